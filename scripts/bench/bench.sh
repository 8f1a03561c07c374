#!/bin/bash
# Runs a benchmark with a Python that can draw, where there is one:
# scripts/bench/bench.sh [--variants [NAME...]]   bench.py
# scripts/bench/bench.sh --file                   bench_file.py
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/common.sh

program=bench.py
if [ "${1-}" = --file ]; then
  program=bench_file.py
  shift
fi
python=$(python_with matplotlib 2>/dev/null) || python=python3
exec "$python" -B "scripts/bench/$program" "$@"
