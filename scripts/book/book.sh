#!/bin/bash
# Builds the book, and says how to look at it. Says first what has to be installed, and
# installs it. FIGURES=no leaves out the figures, which take a browser, if they have not
# been drawn. SERVE=1 serves the book on localhost, too.
#
# Usage: scripts/book/book.sh     (make book)
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/common.sh

pages=$(scripts/install-deps.sh --list build book)
missing=$([ -z "$pages" ] || echo "to build the pages: $pages"
          [ "${FIGURES:-}" = no ] || scripts/book/figures.sh --list)
if [ -n "$missing" ]; then
  echo "The book takes what is not here. This will be installed:"
  sed 's/^/  /' <<<"$missing"
  echo "(make book FIGURES=no draws no figures, and shows their text.)"
  if [ -t 0 ] && [ -t 1 ]; then
    read -rt 10 -p "It begins in 10 seconds. Enter: now. Ctrl-C: not at all. " || echo
  fi
else
  echo "Nothing has to be installed."
fi

scripts/install-deps.sh build book
python=$(python_with markdown_it mdit_py_plugins pygments)
# A book without pictures is better than none.
[ "${FIGURES:-}" = no ] || scripts/book/figures.sh --book ||
  echo "the figures cannot be drawn here (see above); the book has their text" >&2
"$python" scripts/book/book.py

echo "The book is in build/book ($(du -sh build/book | cut -f1)). To look at it:"
echo "  xdg-open build/book/index.html"
if [ -n "${SERVE:-}" ]; then
  port=${PORT:-8000}
  echo "or, until you press Ctrl-C: http://localhost:$port/"
  exec "$python" -m http.server --bind 127.0.0.1 -d build/book "$port"
fi
