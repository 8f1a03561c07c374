#!/bin/bash
# Looks at the book in a browser. Takes pytest's options.
#
# Usage: scripts/book/test.sh [PYTEST_OPTION...]     (make test-book)
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/common.sh

# It checks contrast, names and landmarks. No package runs code while it is installed.
axe=axe-core@4.10.3
dir=build/axe
if [ "$axe" != "$(cat "$dir/.installed" 2>/dev/null)" ]; then
  mkdir -p "$dir"
  run npm install --prefix "$dir" --no-save --no-package-lock --ignore-scripts \
    --no-audit --no-fund "$axe"
  echo "$axe" >"$dir/.installed"
fi

python=$(python_with pytest selenium)
"$python" -m pytest -q scripts/book/test_pages.py "$@"
