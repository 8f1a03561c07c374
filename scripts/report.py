#!/usr/bin/env python3
"""Tries the programs on this machine, and prints a block about that to send to us (make
report). What it tries is on standard error. The block has no addresses and no names of
hosts, users or folders. What fails is part of the block.

Usage: make 6_write 7_queue build/watch.so && scripts/report.py
Whatever chooses a provider or an interface does so here, too."""

import collections
import getpass
import glob
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile

ROOT = os.path.abspath(f"{os.path.dirname(os.path.realpath(__file__))}/..")
BUILD = os.environ.get("BUILD") or "build"
LIMIT = 60  # seconds for each command
# The client's arguments of 7_queue: pages, how many, and how often.
RUNS = [("64", "1000", "200"), ("65536", "1000", "40"), ("1048576", "64", "40")]

# Between processes of one host, the efa provider would take shared memory.
os.environ.setdefault("FI_EFA_ENABLE_SHM_TRANSFER", "0")


class Failed(Exception):
    """Something did not work; the text is for the block."""


def clean(text):
    """Returns a text without addresses, and without what names this machine or its user."""
    host = socket.gethostname()
    names = {host, host.split(".")[0], ROOT, os.path.expanduser("~"), tempfile.gettempdir()}
    try:
        names.add(getpass.getuser())
    except (KeyError, OSError):
        pass  # a number without a name
    for name in sorted(names - {"", "/", "localhost"}, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "(name)", text)
    for address in (r"\b\d{1,3}(\.\d{1,3}){3}\b",
                    r"(?<![\w:])([0-9a-fA-F]{0,4}:){2,}[0-9a-fA-F]{0,4}",
                    r"\b0x[0-9a-fA-F]{5,}\b", r"\b[0-9a-fA-F]{12,}\b"):
        text = re.sub(address, "(address)", text)
    return text


def run(*command):
    """Runs a command. Returns what it prints, or says why it has failed."""
    print("+", *command, file=sys.stderr, flush=True)
    with subprocess.Popen(
            ["timeout", "-k", "10", str(LIMIT), *command], cwd=ROOT, universal_newlines=True,
            errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT) as process:
        try:
            output, _ = process.communicate()
        except BaseException:  # Ctrl-C above all
            process.terminate()
            raise
    if process.returncode == 0:
        return output
    lines = output.splitlines()
    lines = [line for line in lines if re.search("error|WRONG", line)] or lines[-3:]
    ended = (f"not done after {LIMIT} s" if process.returncode == 124 else
             f"exit status {process.returncode}")
    raise Failed("\n".join([ended, *map(str.strip, lines[:5])]))


def read(path):
    """The first line of a file; nothing if there is none."""
    try:
        with open(path) as file:
            return file.readline().strip()
    except OSError:
        return ""


def counted(lines):
    """Each line once, with its number."""
    return "\n".join(f"{count} x {line}" for line, count in collections.Counter(lines).items())


def system():
    with open("/etc/os-release") as file:
        name = re.search(r'^PRETTY_NAME="?([^"\n]*)', file.read(), re.M)[1]
    with open("/proc/cpuinfo") as file:
        model = re.search(r"^(?:model name|Model)\s*: (.*)", file.read(), re.M)
    return (f"{name}, Linux {platform.release()}, {platform.machine()}, "
            f"{os.cpu_count()} x {model[1] if model else '?'}")


def fi_info(*options):
    home = os.environ.get("LIBFABRIC_HOME") or "/opt/amazon/efa"
    return run(shutil.which(f"{home}/bin/fi_info") or "fi_info", *options)


def libfabric():
    return re.search(r"^libfabric: (.*)", fi_info("--version"), re.M)[1]


def adapters():
    """Each port, with its adapter's driver: mlx5_core, InfiniBand, 400 Gb/sec (4X NDR)."""
    found = []
    for port in sorted(glob.glob("/sys/class/infiniband/*/ports/*")):
        driver = os.path.realpath(f"{port}/../../device/driver")
        found.append(", ".join([
            os.path.basename(driver) if os.path.exists(driver) else "in software",
            *(read(f"{port}/{name}") for name in ("link_layer", "rate", "state"))]))
    return counted(found) or "none for RDMA"


def gpus():
    if not shutil.which("nvidia-smi"):
        return "none (no nvidia-smi)"
    return counted(run("nvidia-smi", "--query-gpu=name,driver_version",
                       "--format=csv,noheader").splitlines())


def settings():
    return " ".join(f"{name}={value}" for name, value in sorted(os.environ.items())
                    if re.match("FI_|CUDA_VISIBLE", name))


def interfaces():
    """What libfabric finds: the domains of each provider."""
    found = collections.defaultdict(dict)
    for provider, domain in re.findall(r"^provider: (.*)\n.*\n +domain: (.*)",
                                       fi_info("-t", "FI_EP_RDM"), re.M):
        found[provider][domain] = None
    return "\n".join(f"{provider}: {', '.join(domains)}" for provider, domains in found.items())


def transfer(arguments):
    """What a server of 7_queue says: what it uses, and the bandwidth."""
    output = run("scripts/demo.sh", f"{BUILD}/7_queue", *arguments)
    used = re.search(r"^server \| domain: ([^,]+), .*(provider: .*)", output, re.M)
    # After a short transfer it may have been ended before it could print any.
    rates = re.findall(r"bw=.*", output) or ["no bandwidth was printed"]
    return f"{rates[-1]}, {used[1]}, {used[2]}"


def rules():
    """What the recorder says of 6_write on this adapter."""
    with tempfile.TemporaryDirectory() as folder:
        output = run("scripts/watch/run.py", "-q", "-t", str(LIMIT - 20), "-o", folder,
                     f"{BUILD}/6_write")
    return "\n".join(line for line in output.splitlines()
                     if not line.startswith(("Picture: ", "Not seen: ")))


def report():
    """Yields labels and texts."""
    pieces = [("system", system), ("libfabric", libfabric), ("adapters", adapters),
              ("GPUs", gpus), ("settings", settings), ("interfaces", interfaces),
              *((f"7_queue {run[0]}", lambda run=run: transfer(run)) for run in RUNS),
              ("rules", rules)]
    for label, piece in pieces:
        try:
            text = piece()
        except Failed as error:
            text = f"FAILED: {error}"
        except Exception as error:  # whatever it is, the others go on
            text = f"FAILED: {type(error).__name__}: {error}"
        # A kernel's version may look like an address.
        yield label, text if piece is system else clean(text)


def main():
    lines = []
    for label, text in report():
        first, *others = text.splitlines() or [""]
        lines += [f"{label:<15} {first}", *(f"{'':15} {line}" for line in others)]
    print("---- Please send us what is between these lines ----", *lines, "----", sep="\n")


if __name__ == "__main__":
    main()
