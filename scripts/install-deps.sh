#!/bin/bash
# Installs what is missing and nothing else. Says what it is about to run.
#
# Usage: scripts/install-deps.sh [GROUP...]: build (the default), exercise,
# test, rdma, machine, bench, bench-ring, lint, book
set -euo pipefail
. "$(dirname "$0")/common.sh"

[ $# -gt 0 ] || set -- build

# The missing packages, by their names in Debian and Ubuntu, and in Fedora and
# Amazon Linux.
apt=()
dnf=()
# Packages are missing unless the command succeeds.
need() {  # DEBIAN_PACKAGES FEDORA_PACKAGES COMMAND...
  local deb=$1 rpm=$2
  shift 2
  if ! "$@" >/dev/null 2>&1; then
    # Word splitting is meant: there may be several packages.
    apt+=($deb)
    dnf+=($rpm)
  fi
}

has_libfabric() {
  [ -e "${LIBFABRIC_HOME:-/opt/amazon/efa}/include/rdma/fabric.h" ] ||
    pkg-config --exists libfabric
}

has_fi_info() {
  command -v "${LIBFABRIC_HOME:-/opt/amazon/efa}/bin/fi_info" || command -v fi_info
}

has_xxhash() {
  echo '#include <xxhash.h>' | "${CXX:-g++}" -E -x c++ -
}

has_verbs() {
  echo '#include <infiniband/verbs.h>' | "${CXX:-g++}" -E -x c++ -
}

has_mpi() {
  command -v mpirun && command -v mpicxx
}

for group in "$@"; do
  case $group in
    build)
      need g++ gcc-c++ command -v "${CXX:-g++}"
      need make make command -v make
      # Run by "make 4.1", "make diff-4.1", "make watch-2" and "make report".
      need python3 python3 command -v python3
      need "pkg-config libfabric-dev" "pkgconf-pkg-config libfabric-devel" \
        has_libfabric
      # Lists what libfabric finds.
      need libfabric-bin libfabric has_fi_info
      # A header for the checksums of 9_file.
      need libxxhash-dev xxhash-devel has_xxhash
      # 2_verbs does without libfabric.
      need libibverbs-dev rdma-core-devel has_verbs
      ;;
    exercise)
      need python3-pytest python3-pytest python_with pytest
      ;;
    test)
      need git git command -v git
      need "python3-pytest python3-pytest-xdist" \
        "python3-pytest python3-pytest-xdist" python_with pytest xdist
      need iproute2 iproute command -v ip
      need iperf3 iperf3 command -v iperf3
      ;;
    rdma)
      # The libraries of verbs, and the tools of chapters/appendix_setup.md.
      need "rdma-core ibverbs-providers ibverbs-utils" \
        "rdma-core libibverbs libibverbs-utils" command -v ibv_devinfo
      need iproute2 iproute command -v rdma
      need kmod kmod command -v modprobe
      ;;
    machine)
      need qemu-system-x86 qemu-system-x86-core command -v qemu-system-x86_64
      need busybox-static busybox command -v busybox
      need cpio cpio command -v cpio
      ;;
    bench)
      need iperf3 iperf3 command -v iperf3
      if ls /sys/class/infiniband/* >/dev/null 2>&1; then
        need perftest perftest command -v ib_write_bw
      fi
      ;;
    bench-ring)
      need "openmpi-bin libopenmpi-dev" "openmpi openmpi-devel" has_mpi
      ;;
    lint)
      need clang-format clang-tools-extra command -v clang-format
      ;;
    book)
      need "python3-markdown-it python3-mdit-py-plugins python3-pygments" \
        "python3-markdown-it-py python3-mdit-py-plugins python3-pygments" \
        python_with markdown_it mdit_py_plugins pygments
      ;;
    *)
      echo "usage: $0 [build] [exercise] [test] [rdma] [machine] [bench]" \
        "[bench-ring] [lint] [book]" >&2
      exit 2
      ;;
  esac
done

[ ${#apt[@]} -gt 0 ] || exit 0
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || {
    echo "error: missing: ${apt[*]}; installing takes root or sudo" >&2
    exit 1
  }
  as_root=(sudo)
fi

if command -v apt-get >/dev/null; then
  run "${as_root[@]}" apt-get update -q
  run "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -q -y --no-install-recommends "${apt[@]}"
elif command -v dnf >/dev/null; then
  run "${as_root[@]}" dnf install -y "${dnf[@]}"
else
  echo "error: neither apt-get nor dnf is here; missing: ${apt[*]}" >&2
  exit 1
fi
