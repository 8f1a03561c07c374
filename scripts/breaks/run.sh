#!/bin/bash
# Builds a program with one thing broken on purpose (make break-10), and says what to
# do with it. What is broken, and that, stands at the top of the patch.
#
# Usage: scripts/breaks/run.sh NUMBER
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/common.sh

patch=$(ls scripts/breaks/"$1"_*.patch 2>/dev/null) || {
  echo "error: there is nothing to break in $1; there is in:" \
    "$(ls scripts/breaks/*.patch | sed 's|.*/\([0-9]*\)_.*|\1|' | sort -n | xargs)" >&2
  exit 2
}
program=$(basename "$patch" .patch)
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
# A copy is broken, in a folder of its own.
mkdir "$dir/src"
cp "src/$program.cpp" "$dir/src/"
(cd "$dir" && git apply "$OLDPWD/$patch")
cp Makefile "$dir/"
build=$(realpath "${BUILD:-build}")/break
make -s -C "$dir" BUILD="$build" "$build/$program"
sed '/^--- a/,$d' "$patch"
