#!/bin/bash
# Runs a benchmark with a Python that can draw, where there is one.
#
# Usage: scripts/bench/bench.sh queue|variants|file|lock|rails|crowd|ring
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/common.sh

name=${1/variants/queue}
python=$(python_with matplotlib 2>/dev/null) || python=python3
exec "$python" -B "scripts/bench/bench_$name.py" "$@"
