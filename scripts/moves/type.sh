#!/bin/bash
# For those who type a move along with its chapter. `type` makes a program of their own,
# src/my_5.cpp, as the program is before the move. `typed` compares it with the program
# after the move, apart from comments, blanks and the places where lines break.
#
# Usage: scripts/moves/type.sh type-5.3|typed-5.3    (make type-5.3, make typed-5.3)
#   FORCE=1  writes over a program that is there already, and keeps it as src/my_5.cpp~
set -euo pipefail
cd "$(dirname "$0")/../.."

[[ ${1:-} =~ ^(type|typed)-(([0-9]+)\.([1-9][0-9]*))$ ]] || {
  echo "usage: make type-5.3, make typed-5.3; make moves lists the moves" >&2
  exit 2
}
what=${BASH_REMATCH[1]} move=${BASH_REMATCH[2]} step=${BASH_REMATCH[3]}
before=$step.$((BASH_REMATCH[4] - 1))
name=my_$step
mine=src/$name.cpp

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
for state in "$move" "$before"; do
  python3 scripts/moves/moves.py state "$state" "$dir/$state.cpp"
done

# Comments don't count.
code() {  # FILE
  sed -E 's#(^|[ \t]+)//.*##' "$1" | grep -vE '^\s*$'
}
# Nor do blanks, and where a line breaks.
same_as() {  # STATE
  diff -q <(code "$mine" | tr -d '[:space:]') <(code "$dir/$1.cpp" | tr -d '[:space:]') \
    >/dev/null
}

if [ "$what" = typed ]; then
  [ -f "$mine" ] || {
    echo "error: there is no $mine; make type-$move makes it" >&2
    exit 2
  }
  if same_as "$move"; then
    echo "$mine is what it should be after move $move."
    exit
  fi
  echo "$mine differs from the program after move $move; it lacks +, has too much -." \
    "Other names, another order and other line breaks do no harm:"
  code "$mine" >"$dir/mine.cpp"
  code "$dir/$move.cpp" >"$dir/ours.cpp"
  # It exits with 1 for files that differ. Its first lines are about the files.
  { git diff --no-index --patience -w --color-moved \
    --color="$([ -t 1 ] && echo always || echo never)" "$dir/mine.cpp" "$dir/ours.cpp" ||
    [ $? -eq 1 ]; } | tail -n +5
  exit
fi

if [ ! -f "$mine" ] || [ -n "${FORCE:-}" ]; then
  [ ! -f "$mine" ] || cp "$mine" "$mine~"
  cp "$dir/$before.cpp" "$mine"
  echo "$mine is the program before move $move now."
elif same_as "$before"; then
  echo "$mine is the program before move $move already."
else
  echo "error: $mine is there already; make type-$move FORCE=1 writes over it, and keeps" \
    "it as $mine~" >&2
  exit 2
fi
echo "Type what the chapter shows (make diff-$move), then:"
printf '  %-16s  %s\n' "make $name" "builds it, as build/$name" \
  "make typed-$move" "says what it still lacks"
