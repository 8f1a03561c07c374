#!/bin/bash
# Checks everything that needs no program: excerpts, links, names, tables of moves, patches,
# texts that tests replace, formatting. With WRITE=1 it first writes anew what follows from
# the programs, and says what it has changed: see scripts/book/write.py.
#
# Usage: scripts/check.sh [PYTEST_OPTION...]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/common.sh

python=$(python_with pytest xdist)
[ "${WRITE:-}" != 1 ] || "$python" scripts/book/write.py
exec "$python" -m pytest -q -n 2 -rs -m static scripts/tests "$@"
