#!/bin/bash
# Builds everything that the tests run, then runs them.
#
# Usage: scripts/test.sh [PYTEST_OPTION...]
#   scripts/test.sh                        runs scripts/check.sh first, before it builds
#   scripts/test.sh -k test_four_clients   runs one test
#   scripts/test.sh -k test_chapters       runs those of one file
# Named like this, a test runs with every program and provider that it takes. Without
# options, or with ALL=0, most run with each of these once, and some not at all: see
# scripts/README.md.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/common.sh

# Building takes minutes, so what is missing is said first.
python=$(python_with pytest xdist)
compiler=${CXX:-g++}
for tool in make git "${compiler%% *}"; do
  command -v "$tool" >/dev/null || {
    echo "error: there is no $tool in PATH; scripts/install-deps.sh build test" \
      "installs what is missing" >&2
    exit 1
  }
done

# The tests look for the programs here.
export BUILD=build
export ALL=${ALL:-$(($# > 0))}

[ $# -gt 0 ] || {
  scripts/check.sh
  set -- -m "not static"
}

# Compiles the headers of the programs once, for what is built with these options. Where
# that fails, all is compiled as usual.
compile_headers() {  # FOLDER CXXFLAGS
  local headers=$1/headers.h home=${LIBFABRIC_HOME:-$(ls -d /opt/amazon/efa 2>/dev/null)}
  local flags="$2 ${home:+-I$home/include}"
  [ -n "$home" ] || flags+=$(pkg-config --cflags libfabric)
  mkdir -p "$1"
  {
    echo "// $flags"
    cat src/*.cpp | grep -E '^#include <' | grep -v -e cuda -e infiniband -e xxhash | sort -u
  } >"$headers.new"
  if ! cmp -s "$headers.new" "$headers" || [ ! -e "$headers.gch" ]; then
    mv "$headers.new" "$headers"
    # Word splitting is meant.
    $compiler -std=c++20 -Wall -Wextra -Werror $flags \
      -x c++-header -o "$headers.gch" "$headers" || rm -f "$headers.gch"
  fi
}

include_headers() {  # FOLDER
  [ ! -e "$1/headers.h.gch" ] || echo " -include $PWD/$1/headers.h"
}

# Reports need line numbers (-g1), and nothing else that takes a compiler long. A pointer
# that is null is found without a check of each: the program stops there.
sanitize="-O0 -g1 -fsanitize=address,undefined"
sanitize+=" -fno-sanitize=null,object-size,returns-nonnull-attribute,vptr"
quick="-O0 -fPIC"  # also for libraries
compile_headers build "$quick" &  # for those that tests build themselves
compile_headers build/sanitized "$sanitize" &
wait
# A program of somebody's own is no matter of the tests, and may be half done.
export TOOL_CXXFLAGS="$quick$(include_headers build)"
export STAND_IN_CXXFLAGS=$TOOL_CXXFLAGS
make -j2 all OWN= build/sender build/allocator build/bench_loop build/watch.so \
  stand-ins
sanitize+=$(include_headers build/sanitized)
make -j2 all OWN= BUILD=build/sanitized CXXFLAGS="$sanitize"

# With tcp, libfabric 1.17 has 4096 buffers ready for each endpoint, 70 MB that the kernel
# must clear. The tests need less, and take a tenth less work; test-all has all of them.
[ "$ALL" = 1 ] || export FI_OFI_RXM_MSG_RX_SIZE=1024

stand_in_for_psm "$PWD/build/no-psm" build/4_hello
export LD_LIBRARY_PATH="$PWD/build/no-psm${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

# Most tests spend their time waiting, so several of them wait at a time. On two cores,
# seven took a tenth less time than five, and eight as long as seven.
without_symbols "$python" -m pytest -n 7 --dist loadgroup -rs \
  scripts/tests "$@"
