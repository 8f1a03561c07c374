#!/bin/bash
# Runs a server and a client side by side, as two terminals would.
# Exits with the client's status.
#
# Usage: scripts/demo.sh PROGRAM [CLIENT_ARGUMENT...]
set -euo pipefail

program=$1
shift
# The default of 7_queue moves 65 GB; a demonstration can do with less.
if [ $# -eq 0 ] && [ "$(basename "$program")" = 7_queue ]; then
  set -- 65536 1000 50
fi

dir=$(mktemp -d)
server=
client=
cleanup() {
  trap '' INT TERM
  for pid in $client $server; do
    kill -TERM "$pid" 2>/dev/null || true
  done
  # Who labels what a program prints waits for that program to open the pipe.
  # Should it never have come to that, this is the end of the wait.
  : <>"$dir/server" || true
  : <>"$dir/client" || true
  wait
  rm -rf "$dir"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Puts a label before each line, until whoever writes has ended.
label() {
  trap '' INT TERM
  local line after_command=
  while IFS= read -r line; do
    printf '%s | %s\n' "$1" "$line"
    # The line after this one is the client's command; the address ends it.
    if [ -n "$after_command" ]; then
      echo "${line##* }" >"$dir/address.new"
      mv "$dir/address.new" "$dir/address"
    fi
    after_command=
    [[ $line != "Run the client"* ]] || after_command=yes
  done
}

mkfifo "$dir/server" "$dir/client"
label server <"$dir/server" &
label client <"$dir/client" &

"$program" >"$dir/server" 2>&1 &
server=$!
while [ ! -e "$dir/address" ]; do
  kill -0 "$server" 2>/dev/null || {
    echo "error: the server has ended" >&2
    exit 1
  }
  sleep 0.05
done

"$program" "$(cat "$dir/address")" "$@" >"$dir/client" 2>&1 &
client=$!
status=0
wait "$client" || status=$?
client=
exit "$status"
