#!/bin/bash
# Builds the book, and says how to look at it.
#
# Usage: scripts/book/book.sh     (make book)
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/common.sh

scripts/install-deps.sh build book
python=$(python_with markdown_it mdit_py_plugins pygments)
"$python" scripts/book/book.py
echo "To look at the book: xdg-open build/book/index.html"
