#!/bin/bash
# Runs bench.py with a Python that can draw:
# scripts/bench/bench.sh [--variants [NAME...]]
set -euo pipefail
cd "$(dirname "$0")/../.."

# Nothing of the make that called us, but its variables are meant.
unset MAKEFLAGS MAKELEVEL MFLAGS

for python in $(type -aP python3); do
  if "$python" -c 'import matplotlib' 2>/dev/null; then
    exec "$python" -B scripts/bench/bench.py "$@"
  fi
done
echo "error: no python3 in PATH has matplotlib; try scripts/install-deps.sh bench" >&2
exit 1
