#!/bin/bash
# Runs bench.py with a Python that can draw, where there is one:
# scripts/bench/bench.sh [--variants [NAME...]]
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/common.sh

python=$(python_with matplotlib 2>/dev/null) || python=python3
exec "$python" -B scripts/bench/bench.py "$@"
