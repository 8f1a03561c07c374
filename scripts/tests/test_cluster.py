"""Server and clients on the machines of a scheduler: a Slurm of two machines, which are
network namespaces of this one."""

import os
import re
import shutil
import signal
import subprocess
import time

import pytest

from harness import BUILD, ROOT

SCRIPT = "scripts/cluster/slurm.sh"
PROGRAMS = ["munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel"]

# Machines have more processors than this one, so that jobs needn't wait for each other.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={here}(10.123.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=first NodeAddr=10.123.0.1 NodeHostname={here} CPUs=16
NodeName=second NodeAddr=10.123.0.2 NodeHostname={here} CPUs=16
PartitionName=test Nodes=ALL Default=YES
"""


class Slurm:
    """Commands for a Slurm whose configuration is in a folder, in a namespace."""

    def __init__(self, folder, host):
        self.folder = folder
        self.host = host
        self.env = {"SLURM_CONF": f"{folder}/slurm.conf"}

    def command(self, *command, **env):
        return subprocess.run(
            ["ip", "netns", "exec", self.host, *command], cwd=ROOT, check=False, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60,
            env={**os.environ, **self.env, **env}).stdout

    def submit(self, *arguments, **env):
        """Returns the number of a job."""
        said = self.command("sbatch", "-o", f"{self.folder}/job-%j", *arguments, **env)
        return re.search(r"Submitted batch job (\d+)", said)[1]

    def result(self, job):
        """Waits for the end of a job. Returns its exit status and its output."""
        end = time.monotonic() + 90
        while True:
            said = self.command("scontrol", "show", "job", job)
            if not re.search("JobState=(PENDING|CONFIGURING|RUNNING|COMPLETING)", said):
                break
            assert time.monotonic() < end, said
            time.sleep(0.3)
        with open(f"{self.folder}/job-{job}") as file:
            return int(re.search(r" ExitCode=(\d+):0", said)[1]), file.read()


@pytest.fixture
def slurm(hosts, run):
    """A Slurm of its own. All that it has started is ended afterwards."""
    folder = run.new_folder()
    slurm = Slurm(folder, hosts[0])
    with open(f"{folder}/munge.key", "wb", opener=lambda path, flags: os.open(
            path, flags, 0o600)) as file:
        file.write(os.urandom(1024))
    with open(f"{folder}/slurm.conf", "w") as file:
        file.write(CONFIGURATION.format(folder=folder, here=os.uname().nodename.split(".")[0]))
    # Nothing of ours uses it, but without a plug-in slurmd looks for a file system.
    with open(f"{folder}/cgroup.conf", "w") as file:
        file.write("CgroupPlugin=cgroup/v1\n")
    try:
        run(["munged", "--foreground", "--force", f"--key-file={folder}/munge.key",
             *(f"--{name}-file={folder}/munged.{name}" for name in ("log", "pid", "seed")),
             f"--socket={folder}/munge.socket"], netns=hosts[0])
        while not os.path.exists(f"{folder}/munge.socket"):
            time.sleep(0.05)
        run(["slurmctld", "-D"], netns=hosts[0], **slurm.env).wait_for("Running as primary")
        for host, name in zip(hosts, ["first", "second"]):
            run(["slurmd", "-D", "-N", name], netns=host, **slurm.env)
        end = time.monotonic() + 60
        while not re.search(r" 2 +idle ", slurm.command("sinfo", "--noheader")):
            assert time.monotonic() < end, slurm.command("sinfo")
            time.sleep(0.2)
        yield slurm
    finally:
        slurm.command("scancel", "--user=root")
        for host in hosts:
            for pid in slurm.command("ip", "netns", "pids", host).split():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass


@pytest.mark.skipif(not all(map(shutil.which, PROGRAMS)), reason="Slurm is not installed")
def test_slurm(slurm, tmp_path):
    """Clients get the address of the server wherever they run, the status of the job is
    theirs, nothing is left running, and what fails says so."""
    silent = tmp_path / "4_hello"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    jobs = [slurm.submit(*arguments, **env) for *arguments, env in (
        ("-N", "2", SCRIPT, "7_queue", "65536", "100", "5", {}),
        ("-N", "1", "--ntasks-per-node=2", SCRIPT, "4_hello", "a text", {}),
        ("-N", "2", SCRIPT, "7_queue", "0", "1", {}),
        ("-N", "1", SCRIPT, "4_hello", {"BUILD": str(tmp_path), "ADDRESS_LIMIT": "1"}),
        ("-N", "1", SCRIPT, "4_hello", {"FI_PROVIDER": "none"}),
        ("-N", "1", SCRIPT, "4_none", {}),
        ("-N", "2", SCRIPT, "15_ring", "1000", {}),
        ("-N", "1", SCRIPT, "2_first", {}))]
    (two, one, wrong, quiet, ended, missing, peers, first) = map(slurm.result, jobs)

    assert two[0] == 0 and two[1].startswith("server on first; "), two
    assert re.search(r"^server \| \[1\] Received CONNECT .*0a7b0002", two[1], re.M), two
    assert re.search(r"^server \| \[1\] .* 100%, .* bw=", two[1], re.M), two
    assert two[1].endswith("client 0 | Data is correct.\n")
    assert one[0] == 0, one
    assert one[1].count("server | Received 6 bytes: a text\n") == 2, one
    assert {*re.findall(r"^client (\d) \| Sent 6 bytes\.$", one[1], re.M)} == {"0", "1"}
    assert wrong[0] == 2 and "client 0 | error: not a number from 1 to " in wrong[1], wrong
    assert quiet[0] == 1 and "printed no address for 1 s" in quiet[1], quiet
    assert ended[0] == 1 and "error: the server has ended" in ended[1], ended
    assert missing[0] == 1 and "there is no build/4_none in " in missing[1], missing
    assert peers[0] == 0 and {*re.findall(r"^(\d): \[\1\] 4000 bytes in .*Correct\.$", peers[1],
                                          re.M)} == {"0", "1"}, peers
    # This server ends by itself.
    assert first[0] == 0 and "server | Received " in first[1], first
    left = [slurm.command("ps", "-o", "args=", "-p", pid)
            for pid in slurm.command("ip", "netns", "pids", slurm.host).split()]
    assert not [line for line in left if BUILD in line or "sleep" in line], left


def test_slurm_without_a_job():
    """It says how to call it."""
    env = {name: value for name, value in os.environ.items() if name != "SLURM_JOB_ID"}
    done = subprocess.run([SCRIPT, "4_hello"], cwd=ROOT, check=False, text=True, env=env,
                          capture_output=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: usage: sbatch -N 2 scripts/cluster/slurm.sh ")
