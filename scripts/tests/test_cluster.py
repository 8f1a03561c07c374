"""scripts/cluster/slurm.sh, with an srun that runs everything on this machine."""

import os
import subprocess

import pytest

from harness import BUILD, ROOT

SRUN = """#!/bin/bash
# srun --label MACHINES... -n COUNT -c CPUS PROGRAM...
while [ "$1" != -n ]; do shift; done
count=$2
shift 4
for ((i = 0; i < count; ++i)); do
  { "$@" 2>&1; echo "status $?"; } | sed "s/^/$i: /" &
done | tee "$0.said"
status=$(sed -n 's/.*status \\([^0]\\)/\\1/p' "$0.said" | head -1)
exit "${status:-0}"
"""


def job(folder, *arguments, machines="2", tasks="1", **env):
    """Runs a job. Returns its exit status and what it has printed."""
    (folder / "srun").write_text(SRUN)
    (folder / "srun").chmod(0o755)
    done = subprocess.run(
        ["scripts/cluster/slurm.sh", *arguments], cwd=ROOT, check=False, text=True, timeout=60,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "BUILD": BUILD,
             "SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": machines, "SLURMD_NODENAME": "first",
             "SLURM_JOB_NODELIST": "first,second", "SLURM_NTASKS_PER_NODE": tasks,
             "SLURM_CPUS_PER_TASK": "2", **env})
    return done.returncode, done.stdout


def test_clients(tmp_path):
    """Each gets the address of the server, which ends with them."""
    status, said = job(tmp_path, "4_hello", "a text", machines="3", tasks="2")
    assert status == 0 and said.startswith("server on first; "), said
    assert said.count("server | Received 6 bytes: a text\n") == 4, said
    assert all(f"client {i} | Sent 6 bytes.\n" in said for i in range(4)), said


@pytest.mark.parametrize("arguments,env,status,message", [
    (["7_queue", "0", "1"], {"machines": "1"}, 2, "client 0 | error: not a number from 1 to "),
    (["4_hello"], {"FI_PROVIDER": "none"}, 1, "error: the server has ended"),
    (["4_hello"], {"SLURM_JOB_ID": ""}, 1, "error: usage: sbatch -N 2 scripts/cluster/slurm.sh ")])
def test_what_fails(tmp_path, arguments, env, status, message):
    """The job's status is that of a client, and what fails says so."""
    found, said = job(tmp_path, *arguments, **env)
    assert found == status and message in said, said
