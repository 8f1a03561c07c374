#!/bin/bash
# Runs the four ranks of a program whose sides are peers, as 15_ring, side by side, as four
# terminals would. Exits with 0 if all of them do.
#
# Usage: scripts/peers.sh PROGRAM [ARGUMENT...]
set -euo pipefail

program=$1
shift
ranks=4
dir=$(mktemp -d)
pids=()
cleanup() {
  trap '' INT TERM PIPE
  [ ${#pids[@]} = 0 ] || kill -TERM "${pids[@]}" 2>/dev/null || true
  # Whatever still waits for a pipe's other end gets one.
  for pipe in "$dir"/pipe.*; do : <>"$pipe"; done
  wait
  rm -rf "$dir"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

for ((rank = 0; rank < ranks; ++rank)); do
  mkfifo "$dir/pipe.$rank"
  { trap '' INT TERM && exec sed -u "s/^/rank $rank | /" <"$dir/pipe.$rank"; } &
  "$program" "$dir/run" "$rank" "$ranks" "$@" >"$dir/pipe.$rank" 2>&1 &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit "$status"
