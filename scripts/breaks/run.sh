#!/bin/bash
# Builds a program with one thing broken or changed on purpose, and says what to do with
# it. What that is stands at the top of the patch:
#
#   make break-8         8_malloc.patch, of src/8_malloc.cpp
#   make break-8.asleep  8_malloc.asleep.patch, another one
#   make break-10.4      10.4.patch, of the program after that move
#
# Usage: scripts/breaks/run.sh NAME
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/common.sh

# Each patch, behind the name that the target has for it: "8.asleep 8_malloc.asleep".
patches=$(ls scripts/breaks |
  sed -nE 's/^([0-9]+)(_\w+)?(\.\w+)?\.patch$/\1\3 \1\2\3/p' | sort -V)
patch=$(awk -v name="$1" '$1 == name { print $2 }' <<<"$patches")
[ -n "$patch" ] || {
  echo "error: there is nothing to break in $1; there is in:" \
    "$(cut -d' ' -f1 <<<"$patches" | xargs)" >&2
  exit 2
}
# build/break/8_malloc, build/break/8.asleep, build/break/10.4
program=$1
[[ $program == *.* ]] || program=$patch
source=${patch%%.*}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
# A copy is broken, in a folder of its own.
mkdir "$dir/src"
if [[ $patch == *_* ]]; then
  cp "src/$source.cpp" "$dir/src/"
else
  source=$patch
  python3 scripts/moves/moves.py state "$source" >"$dir/src/$source.cpp"
fi
(cd "$dir" && git apply "$OLDPWD/scripts/breaks/$patch.patch")
[ "$source" = "$program" ] || mv "$dir/src/$source.cpp" "$dir/src/$program.cpp"
cp Makefile "$dir/"
build=$(realpath "${BUILD:-build}")/break
make -s -C "$dir" BUILD="$build" "$build/$program"
cp "$dir/src/$program.cpp" "$build/"  # for the recorder, and for you
sed '/^--- a/,$d' "scripts/breaks/$patch.patch"
