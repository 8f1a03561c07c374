#!/bin/bash
# Runs the programs over real verbs (make test-rdma): over Soft-RoCE on this machine,
# if its kernel can do that and we are root, otherwise in a virtual machine.
#
# Usage: scripts/rdma/test.sh [PYTEST_OPTION...]
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/common.sh
PATH=$PATH:/usr/sbin:/sbin

if [ "$(id -u)" -eq 0 ] && modprobe -q -n -a rdma_rxe rdma_ucm dummy; then
  where=()
  echo "This kernel can do Soft-RoCE, so the tests run here, on an interface of" \
    "their own. They take a few minutes. What is missing is installed first."
else
  where=(scripts/rdma/machine.sh)
  echo "The kernel of this machine has no Soft-RoCE, or we are not root, so the" \
    "tests run in a virtual machine. What is missing is installed first: QEMU and" \
    "the libraries for RDMA (about 30 MB to download, 120 MB on disk). A kernel" \
    "comes into build/rdma/ (70 MB to download, 400 MB on disk). Where KVM works," \
    "all takes some minutes; otherwise the processor is emulated, and it takes half" \
    "an hour."
fi
scripts/install-deps.sh build test rdma ${where:+machine}

# The tests look for the programs here.
build=build/rdma/build
make -s -j2 all OWN= $build/{sender,strict.so} BUILD=$build CUDA_HOME=
"${where[@]}" scripts/rdma/inside.sh "$@"
