#!/bin/bash
# Runs the tests over real verbs, on a machine whose kernel can do Soft-RoCE: this
# one, or the virtual machine that machine.sh starts. test.sh has built the programs.
#
# Usage: scripts/rdma/inside.sh [PYTEST_OPTION...]
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/common.sh

export BUILD=build/rdma/build
# More time for the tests than on a real processor.
export TIME_FACTOR=5
# Every combination that makes sense here.
export ALL=1
scripts/soft-roce up
trap 'scripts/soft-roce down' EXIT
ulimit -l unlimited
ibv_devinfo -d rxe0
# With a device there, verbs is libfabric's first choice, so the tests of the default
# provider run over verbs.
export FI_UNIVERSE_SIZE=100
env -u FI_PROVIDER fi_info -t FI_EP_RDM | sed -n 1,4p

# Left out: the other providers; what does not get as far as a network; what is about
# a disk; network namespaces, for which rxe of Linux 6.1 does not work; what measures
# how much of a core a program takes; and what takes an emulated processor longer than
# the programs and the tests wait for each other, or than anybody waits for the tests.
without=(shm net sockets ofi_rxd
  help list wrong_arguments no_provider address_of second_signal allocator
  names directory existing created permission attributes no_source disk_full
  size_limit terminal beyond
  two_hosts slow_cable
  idle
  crowd stood_still waiting memory_for_all nearly_everything many_senders largest
  one_after ninth test_signals at_the_start first_contact flood four_clients many_slots
  nobody_reads bad_answers "(in_a_session and 9_file)")
RDMA=1 without_symbols "$(python_with pytest xdist)" -m pytest --color=no -n 2 -v -rsx \
  -k "$(printf 'not %s and ' "${without[@]}")not nothing" "$@" \
  scripts/tests/test_rdma.py \
  scripts/tests/test_{programs,failures,messages,malloc,file,lock}.py
