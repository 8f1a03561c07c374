#!/bin/bash
# Builds the book, and says how to look at it. SERVE=1 serves it on localhost, too.
#
# Usage: scripts/book/book.sh     (make book)
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/common.sh

python=$(python_with markdown_it mdit_py_plugins pygments)
# A book without pictures is better than none.
scripts/book/figures.sh --book ||
  echo "the figures cannot be drawn here (see above); the book has their text" >&2
"$python" scripts/book/book.py

echo "The book is in build/book ($(du -sh build/book | cut -f1)). To look at it:"
echo "  xdg-open build/book/index.html"
if [ -n "${SERVE:-}" ]; then
  port=${PORT:-8000}
  echo "or, until you press Ctrl-C: http://localhost:$port/"
  exec "$python" -m http.server --bind 127.0.0.1 -d build/book "$port"
fi
