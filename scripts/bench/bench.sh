#!/bin/bash
# Runs a benchmark with a Python that can draw, where there is one:
# scripts/bench/bench.sh [--variants [NAME...]]   bench.py
# scripts/bench/bench.sh --file                   bench_file.py
# scripts/bench/bench.sh --lock                   bench_lock.py
# scripts/bench/bench.sh --rails                  bench_rails.py
# scripts/bench/bench.sh --crowd                  bench_crowd.py
# scripts/bench/bench.sh --ring                   bench_ring.py
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/common.sh

program=bench.py
case ${1-} in
  --file | --lock | --rails | --crowd | --ring)
    program=bench_${1#--}.py
    shift
    ;;
esac
python=$(python_with matplotlib 2>/dev/null) || python=python3
exec "$python" -B "scripts/bench/$program" "$@"
