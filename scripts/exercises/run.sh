#!/bin/bash
# Checks what a reader has made of an exercise: make exercise-4. The program has
# been built, into $BUILD. Fails until the exercise is solved. Says first what the
# recorder sees in a run of it, which decides nothing.
#
# Usage: scripts/exercises/run.sh NUMBER [PYTEST_OPTION...]
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/common.sh

exercise=scripts/exercises/exercise_$1.py
[ -e "$exercise" ] || {
  echo "error: there is no exercise $1; there are:" \
    "$(ls scripts/exercises/exercise_*.py | tr -dc '0-9\n' | sort -n | xargs)" >&2
  exit 2
}

build=${BUILD:-build}
program=$(programs | grep "^$1_")
shift

if [ -e "$build/watch.so" ] && [ -e "$build/$program" ]; then
  echo "One run of it, watched:"
  python3 scripts/watch/run.py -q -t 20 "$build/$program" || true
  echo
fi

python=$(python_with pytest)
exec "$python" -m pytest --tb=short -q "$exercise" "$@"
