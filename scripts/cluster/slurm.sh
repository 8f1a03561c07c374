#!/bin/bash
#SBATCH --job-name=rdma --time=10 --cpus-per-task=2
# Runs a server on the first machine of a Slurm job and a client on each of the others,
# or both on the same one where there is only one. The job's status is the clients'.
#
# Usage, in the root of the repository, which all machines have to see:
#   sbatch -N 2 scripts/cluster/slurm.sh 7_queue [CLIENT_ARGUMENT...]
#   sbatch -N 3 --ntasks-per-node=4 scripts/cluster/slurm.sh 13_crowd   # 8 clients
#   sbatch -N 4 scripts/cluster/slurm.sh 15_ring [FLOATS]   # peers: a rank on each
# SERVER_ARGUMENTS, for 9_file a folder, is a variable that sbatch hands on to the job, as it
# does with FI_PROVIDER.
set -euo pipefail

fail() {
  echo "error: $*" >&2
  exit 1
}
if [ -z "${SLURM_JOB_ID:-}" ] || [ $# -eq 0 ]; then
  fail "usage: sbatch -N 2 scripts/cluster/slurm.sh 7_queue [CLIENT_ARGUMENT...]"
fi
program=${BUILD:-build}/$1
shift
[ -x "$program" ] || fail "there is no $program in $PWD on $SLURMD_NODENAME; run make," \
  "and sbatch in the root of the repository, in a folder that all machines see"

. scripts/common.sh
if peers "$program"; then
  # Their folder has to be new, and seen by all machines. Slurm gives them their ranks.
  # They end together, so 30 s after the first one, the others wait for one that never came.
  folder=${BUILD:-build}/ring.$SLURM_JOB_ID
  # shellcheck disable=SC2016  # for the shell of each rank
  exec srun --label --wait=30 -n $((SLURM_JOB_NUM_NODES * ${SLURM_NTASKS_PER_NODE:-1})) \
    -c "$SLURM_CPUS_PER_TASK" bash -c 'program=$1 folder=$2; shift 2
      exec "$program" "$folder" "$SLURM_PROCID" "$SLURM_NTASKS" "$@"' \
    rank "$program" "$folder" "$@"
fi

# Slurm runs this script on the first machine.
echo "server on $SLURMD_NODENAME; machines of this job: $SLURM_JOB_NODELIST"
folder=$(mktemp -d)
mkfifo "$folder/output"
# shellcheck disable=SC2086  # there may be several arguments
"$program" ${SERVER_ARGUMENTS:-} >"$folder/output" 2>&1 &
server=$!
exec {output}<"$folder/output"
rm -r "$folder"
trap 'kill "$server" 2>/dev/null || true' EXIT

# The line after "Run the client …" ends with the address, or FILE comes next.
address=
before=
while [ -z "$address" ]; do
  IFS= read -r line <&"$output" || fail "the server has ended; what it has printed is above"
  echo "server | $line"
  [[ $before != "Run the client"* ]] || address=$(sed 's/ FILE$//; s/.* //' <<<"$line")
  before=$line
done
sed -u 's/^/server | /' <&"$output" &

count=$((SLURM_JOB_NUM_NODES - 1))
machines=(-N "$count" -x "$SLURMD_NODENAME")
[ "$count" -gt 0 ] || { count=1; machines=(-N 1); }
status=0
srun --label "${machines[@]}" -n $((count * ${SLURM_NTASKS_PER_NODE:-1})) \
  -c "$SLURM_CPUS_PER_TASK" \
  "$program" "$address" "$@" 2>&1 | sed -u -E 's/^ *([0-9]+): /client \1 | /' ||
  status=$?
[ "$status" -ne 1 ] || echo "error: a client has failed. If it has heard nothing, the" \
  "machines don't share the network that the server names after 'domain:'; name one:" \
  "FI_TCP_IFACE=eth1 sbatch …" >&2

sleep 1  # for what the server still has to do for them
kill -INT "$server" 2>/dev/null || true  # 2_first ends by itself
timeout 20 tail --pid="$server" -f /dev/null ||
  fail "the server has not ended 20 s after SIGINT; Slurm will kill it"
wait "$server" || fail "the server has failed (status $?)"
wait  # for its last lines
exit "$status"
