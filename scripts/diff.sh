#!/bin/bash
# Shows what a program adds to the one that it is based on, coloured and paged on a
# terminal. If its application replaces that of the other, shows what they share
# first, and then the applications.
#
# Usage: scripts/diff.sh NUMBER PROGRAM...    (make diff-7)
# Of 5, 6 and 7, shows the step in two parts, each of which is a lesson of its own.
# A program of somebody's own has no number. It is named instead: make diff-mine
# Of a move, shows what it is for, and what it adds to the one before: make diff-5.3
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/common.sh

number=$1
shift

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

# Runs a command that prints diffs, coloured and paged on a terminal.
paged() {  # COMMAND...
  if [ -t 1 ]; then
    # Tells git to colour what it writes into the file, as if it had started the pager.
    export GIT_PAGER_IN_USE=1
    "$@" >"$dir/diff"
    LESS=${LESS-FRX} sh -c "$(git var GIT_PAGER)" <"$dir/diff"
  else
    "$@"
  fi
}

# Prints what changes from one state of a program to another: 5_reverse, 6.4, 6_write. Lines
# that only move to the right are not new; others that move have a colour of their own.
states() {  # BEFORE AFTER
  for state in "$1" "$2"; do
    if [ -e "src/$state.cpp" ]; then
      cp "src/$state.cpp" "$dir"
    else
      python3 scripts/moves/moves.py state "$state" "$dir/$state.cpp"
    fi
  done
  (cd "$dir" && git diff --no-index --patience -w --color-moved "$1.cpp" "$2.cpp") ||
    [ $? -eq 1 ]
}

if [[ $number =~ ^([0-9]+)\.([0-9]+)$ ]]; then
  show() {
    python3 scripts/moves/moves.py head "$number"
    states "${BASH_REMATCH[1]}.$((BASH_REMATCH[2] - 1))" "$number"
  }
  paged show
  exit
fi

# Shows a step in two parts, up to a move and behind it.
two_parts() {  # BEFORE MOVE AFTER FIRST SECOND
  printf '==== 1. Moves %s.1 to %s ====\n\n%s.\n\n' "${2%.*}" "$2" "$4"
  states "$1" "$2"
  printf '\n==== 2. From move %s.%s on ====\n\n%s.\n\n' "${2%.*}" $((${2#*.} + 1)) "$5"
  states "$2" "$3"
}

case $number in
  5) parts=(4_hello 5.2 5_reverse
    "Both directions: an address that travels in a message, and an answer"
    "A session for each client: an endpoint of its own, so that nobody waits for another") ;;
  6) parts=(5_reverse 6.4 6_write
    "A WRITE into the memory of another program, and when it has arrived"
    "The same into the memory of a GPU: chapter 6 1/2") ;;
  7) parts=(6_write 7.3 7_queue
    "As fast as the network: a measure, one queue below everything, a limit in flight"
    "No sleep while data moves, and nothing else that costs time") ;;
  *) parts=() ;;
esac
if [ ${#parts[@]} -gt 0 ]; then
  paged two_parts "${parts[@]}"
  exit
fi

program=
for name in "$@"; do
  if [[ $name == "$number" || $number =~ ^[0-9]+$ && $name == "$number"_* ]]; then
    program=$name
    # Of 2_first and 2_verbs, the first.
    [[ $name != "$number"_* ]] || break
  fi
done
[ -n "$program" ] || {
  echo "error: no program has the number $number; there are: $*" >&2
  exit 2
}
before=$(parent "$program")
[ -n "$before" ] || {
  echo "$program is based on no other program"
  exit 0
}

compare() {  # GIT_OPTION...
  # It exits with 1 for files that differ.
  git diff --no-index --patience "$@" "src/$before.cpp" "src/$program.cpp" ||
    [ $? -eq 1 ]
}

# Prints the number of the line where a program's application begins. Prints nothing if
# the program has no such section.
application() {  # PROGRAM
  grep -n -m 1 -x '// ---- The application ----' "src/$1.cpp" | cut -d: -f1 || true
}

before_at=$(application "$before")
program_at=$(application "$program")
[ -n "$before_at" ] && [ -n "$program_at" ] || {
  compare
  exit
}

mkdir -p "$dir/shared/src" "$dir/application/src"
for name in "$before" "$program"; do
  at=$(application "$name")
  head -n $((at - 1)) "src/$name.cpp" >"$dir/shared/src/$name.cpp"
  tail -n +"$at" "src/$name.cpp" >"$dir/application/src/$name.cpp"
done

# An application that loses most of its lines is another application.
removed=$(cd "$dir/application" && compare --numstat | cut -f2)
lines=$(wc -l <"$dir/application/src/$before.cpp")
[ $((2 * ${removed:-0})) -gt "$lines" ] || {
  compare
  exit
}

both() {
  echo "==== 1. What $program shares with $before ===="
  echo
  (cd "$dir/shared" && compare)
  echo
  echo "==== 2. The application of $program, in place of that of $before ===="
  echo "(It begins at line $program_at of src/$program.cpp, which is line 1 here.)"
  echo
  (cd "$dir/application" && compare)
}

paged both
