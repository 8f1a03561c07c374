#!/bin/bash
# Runs a server and a client side by side, as two terminals would; of a program of peers,
# four ranks. Exits with the client's status.
#
# Usage: scripts/demo.sh PROGRAM [CLIENT_ARGUMENT...]
set -euo pipefail

program=$1
shift
. "$(dirname "$0")/common.sh"
# Both sides are on this machine, so over TCP, nobody else need reach the server. But 11_rails
# is to use all adapters.
[ "$(basename "$program")" = 11_rails ] || export FI_TCP_IFACE=${FI_TCP_IFACE-lo}
! peers "$program" || exec "$(dirname "$0")/peers.sh" "$program" "$@"
# These move 33 GB by default, which is more than a demonstration needs.
case $#:$(basename "$program") in
  0:7_queue | 0:14_strangers) set -- 65536 1000 50 ;;
esac

dir=$(mktemp -d)
cleanup() {
  trap '' INT TERM PIPE
  # A program that has only just been started may not hear the first signal, so
  # it gets another one. One that hears it takes up to a second.
  #
  # label() waits for a program to open the pipe. If the program was never
  # started, this ends the wait, which may begin late on a busy machine.
  for i in {0..119}; do
    [ -n "$(jobs -r)" ] || break
    # Not by name: a signal may come before the script knows the number.
    # shellcheck disable=SC2046
    ((i % 40)) || kill -TERM $(jobs -p) 2>/dev/null || true
    : <>"$dir/server" || true
    : <>"$dir/client" || true
    sleep 0.05
  done
  wait
  rm -rf "$dir"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 141' PIPE

# Puts a label before each line until the program that writes them has ended.
label() {
  local line after_command=
  while IFS= read -r line; do
    printf '%s | %s\n' "$1" "$line"
    # The line after this one is the client's command. The address ends it, or
    # FILE comes next.
    if [ -n "$after_command" ]; then
      line=${line% FILE}
      echo "${line##* }" >"$dir/address.new"
      mv "$dir/address.new" "$dir/address"
    fi
    after_command=
    [[ $line != "Run the client"* ]] || after_command=yes
  done
}

mkfifo "$dir/server" "$dir/client"
directory=
if [ "$(basename "$program")" = 9_file ]; then
  directory=$dir/received
  mkdir "$directory"
  [ $# -gt 0 ] || {
    head -c 200000000 /dev/urandom >"$dir/demo.bin"
    set -- "$dir/demo.bin"
  }
fi
# Deaf before they open the pipes: on a busy machine, a client may have ended,
# and the script with it, when they get to its first line.
{ trap '' INT TERM && label server <"$dir/server"; } &
reader=$!
{ trap '' INT TERM && label client <"$dir/client"; } &

"$program" ${directory:+"$directory"} >"$dir/server" 2>&1 &
server=$!
while [ ! -e "$dir/address" ]; do
  # The other one ends when nobody reads what we print: `make demo | head`.
  { kill -0 "$server" && kill -0 "$reader"; } 2>/dev/null || {
    echo "error: the server has ended, or nobody reads what it says" >&2
    exit 1
  }
  sleep 0.05
done

"$program" "$(cat "$dir/address")" "$@" >"$dir/client" 2>&1 &
status=0
wait $! || status=$?
exit "$status"
