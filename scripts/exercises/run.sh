#!/bin/bash
# Checks what a reader has made of an exercise: make exercise-4. The program has
# been built, into $BUILD. Fails until the exercise is solved.
#
# Usage: scripts/exercises/run.sh NUMBER [pytest options]
set -euo pipefail
cd "$(dirname "$0")/../.."

exercise=scripts/exercises/exercise_$1.py
[ -e "$exercise" ] || {
  echo "error: there is no exercise $1; there are:" \
    "$(ls scripts/exercises/exercise_*.py | tr -dc '0-9\n' | tr '\n' ' ')" >&2
  exit 2
}
shift

pytest=(pytest-3)
if python3 -c 'import pytest, xdist' 2>/dev/null; then
  pytest=(python3 -m pytest)
fi
# conftest.py is that of the tests: the exercises start programs as they do.
exec "${pytest[@]}" -p no:cacheprovider --tb=short -q "$exercise" "$@"
