#!/bin/bash
# Shows what a program adds to the one before it, coloured and paged on a terminal.
#
# Usage: scripts/diff.sh NUMBER PROGRAM...    (make diff-7)
set -euo pipefail

number=$1
shift
before=
for program in "$@"; do
  if [ "${program%%_*}" = "$number" ]; then
    [ -n "$before" ] || {
      echo "$program is the first program; nothing comes before it"
      exit 0
    }
    # It exits with 1 for files that differ.
    git diff --no-index --patience "src/$before.cpp" "src/$program.cpp" ||
      [ $? -eq 1 ]
    exit
  fi
  before=$program
done
echo "error: no program has the number $number; there are: $*" >&2
exit 2
