#!/bin/bash
# Builds all that the tests run, then runs them: scripts/test.sh [pytest options]
# For example, one test: scripts/test.sh -k test_four_clients
set -euo pipefail
cd "$(dirname "$0")/.."

# Nothing of the make that called us, but its variables are meant.
unset MAKEFLAGS MAKELEVEL MFLAGS

make -j2
make -j2 BUILD=build/sanitized \
  CXXFLAGS="-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined"
make BUILD=build build/sender build/bench_loop

pytest=(pytest-3)
if python3 -c 'import pytest, xdist' 2>/dev/null; then
  pytest=(python3 -m pytest)
fi
# Most of what the tests do is to wait, so several wait at a time.
exec "${pytest[@]}" -p no:cacheprovider -n 3 scripts/tests "$@"
