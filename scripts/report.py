#!/usr/bin/env python3
"""Tries the programs on this machine, and prints a block about that to send to us (make
report). What it tries is on standard error. The block has no addresses and no names of
hosts, users or folders. What fails is part of the block.

Usage: make 4_hello 6_write 7_queue build/watch.so && scripts/report.py
  CHAPTER  the program of the demo (7_queue)
  SECONDS  how long each size of pages is measured, roughly (4)
Whatever chooses a provider or an interface does so here, too."""

import collections
import getpass
import glob
import os
import platform
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = os.path.abspath(f"{os.path.dirname(os.path.realpath(__file__))}/..")
BUILD = os.environ.get("BUILD") or "build"
CHAPTER = os.environ.get("CHAPTER") or "7_queue"
SECONDS = float(os.environ.get("SECONDS") or 4)
LIMIT = 60  # seconds for each command
# Pages of this size, and so many of them, which is 64 MB at most.
SIZES = [(64, 1000), (65536, 1000), (1048576, 64)]

# Between processes of one host, the efa provider would take shared memory.
os.environ.setdefault("FI_EFA_ENABLE_SHM_TRANSFER", "0")


class Failed(Exception):
    """Something did not work; the text is for the block."""


# ---- What must not be in the block ----

def secrets():
    """Texts that name this machine or its user, the longest first."""
    host = socket.gethostname()
    names = {host, host.split(".")[0], ROOT, os.path.expanduser("~"), tempfile.gettempdir()}
    try:
        names.add(getpass.getuser())
    except (KeyError, OSError):
        pass  # a number without a name
    return sorted(names - {"", "/", "localhost"}, key=len, reverse=True)


def clean(text):
    """Returns a text without these, and without addresses."""
    for name in secrets():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "(name)", text)
    for address in (r"\b\d{1,3}(\.\d{1,3}){3}\b",
                    r"(?<![\w:])([0-9a-fA-F]{0,4}:){2,}[0-9a-fA-F]{0,4}",
                    r"\b0x[0-9a-fA-F]{5,}\b", r"\b[0-9a-fA-F]{12,}\b"):
        text = re.sub(address, "(address)", text)
    return text


# ---- Running ----

def run(*command, quiet=False):
    """Runs a command. Returns what it prints, or says why it has failed."""
    if not quiet:
        print("+", *command, file=sys.stderr, flush=True)
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, universal_newlines=True, errors="replace", stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    except OSError as error:
        raise Failed(f"{command[0]}: {error.strerror}") from error
    try:
        output, _ = process.communicate(timeout=LIMIT)
        if process.returncode == 0:
            return output
        ended = f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        output = end(process)
        ended = f"not done after {LIMIT} s"
    except BaseException:  # Ctrl-C above all
        end(process)
        raise
    lines = output.splitlines()
    lines = [line for line in lines if re.search("error|WRONG", line)] or lines[-3:]
    raise Failed("\n".join([ended, *map(str.strip, lines[:5])]))


def end(process):
    """Ends a command, and all that it has started. Returns what it has printed."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        output, _ = process.communicate(timeout=10)
        time.sleep(1)  # for those that it has left behind
    except subprocess.TimeoutExpired:
        output = None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # none
    return process.communicate()[0] if output is None else output


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


# ---- The machine ----

def system():
    with open("/etc/os-release") as file:
        name = re.search(r'^PRETTY_NAME="?([^"\n]*)', file.read(), re.M)[1]
    return f"{name}, Linux {platform.release()}, {platform.machine()}"


def processor():
    with open("/proc/cpuinfo") as file:
        model = re.search(r"^(?:model name|Model)\s*: (.*)", file.read(), re.M)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{os.cpu_count()} x {model[1] if model else '?'}, {memory:.0f} GB"


# The version as libfabric has it, which may have a name behind the number.
VERSION = """
import ctypes, sys
fi_tostr = ctypes.CDLL(sys.argv[1]).fi_tostr
fi_tostr.restype = ctypes.c_char_p
print(fi_tostr(b"", 18).decode())  # FI_TYPE_VERSION
"""


def libfabric():
    library = re.search(r"libfabric\.so\S* => (\S+)", run("ldd", f"{BUILD}/4_hello", quiet=True))
    if not library:
        raise Failed(f"{BUILD}/4_hello finds none")
    place = "Amazon's" if library[1].startswith("/opt/amazon") else ""
    return f"{run(sys.executable, '-c', VERSION, library[1], quiet=True).strip()} {place}".strip()


def driver(device):
    """The driver of a device and what kind of device it is: mlx5_core 15b3:1021."""
    if not os.path.exists(f"{device}/driver"):
        return "in software"
    kind = [read(f"{device}/{name}").replace("0x", "", 1) for name in ("vendor", "device")]
    return f"{os.path.basename(os.path.realpath(f'{device}/driver'))} {':'.join(kind)}"


def adapters():
    found = []
    for adapter in sorted(glob.glob("/sys/class/infiniband/*")):
        for port in sorted(glob.glob(f"{adapter}/ports/*")):
            parts = [driver(f"{adapter}/device"), read(f"{adapter}/board_id"),
                     read(f"{port}/link_layer"), read(f"{port}/rate"), read(f"{port}/state")]
            found.append(", ".join(filter(None, parts)))
    return counted(found) or "none for RDMA"


def cards():
    found = []
    for card in sorted(glob.glob("/sys/class/net/*")):
        if os.path.exists(f"{card}/device"):
            speed = read(f"{card}/speed")
            found.append(driver(f"{card}/device").rstrip(": ") +
                         (f", {speed} Mb/s" if speed.isdigit() else ""))
    return counted(found) or "none"


def gpus():
    if not shutil.which("nvidia-smi"):
        return "none (no nvidia-smi)"
    lines = run("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    kind = "open" if "Open" in read("/proc/driver/nvidia/version") else "closed"
    peer = "with" if os.path.exists("/sys/module/nvidia_peermem") else "without"
    return counted(lines.splitlines()) + f"\n{kind} kernel module, {peer} nvidia_peermem"


def limits():
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    with open("/proc/meminfo") as file:
        huge = re.search(r"HugePages_Total:\s+(\d+)", file.read())
    return (f"locked memory {'unlimited' if locked < 0 else f'{locked >> 10} KiB'}, "
            f"huge pages {huge[1] if huge else 'none'}")


def settings():
    names = sorted(name for name in os.environ if re.match("FI_|CUDA_VISIBLE", name))
    return " ".join(f"{name}={os.environ[name]}" for name in names)


# ---- The programs ----

def interfaces():
    """What libfabric finds: the domains of each provider."""
    home = os.environ.get("LIBFABRIC_HOME") or "/opt/amazon/efa"
    fi_info = shutil.which(f"{home}/bin/fi_info") or "fi_info"
    found = collections.defaultdict(dict)
    for provider, domain in re.findall(r"^provider: (.*)\n.*\n +domain: (.*)",
                                       run(fi_info, "-t", "FI_EP_RDM"), re.M):
        found[provider][domain] = None
    return "\n".join(f"{provider}: {', '.join(domains)}" for provider, domains in found.items())


def transfer(program, *arguments):
    """Runs a server and a client. Returns their output."""
    return run("scripts/demo.sh", f"{BUILD}/{program}", *map(str, arguments))


def rate(output):
    """The last one that a server has printed: Gbps, and all of it. After a short
    transfer the server may have been ended before it could print any."""
    last = (0, "the server has printed no rate")
    for match in re.finditer(r"bw=([\d.]+)Gbps.*", output):
        last = (float(match[1]), match[0])
    return last


def demo():
    output = transfer(CHAPTER)
    used = re.search(r"^server \| domain: ([^,]+), .*(provider: .*)", output, re.M)
    last = re.findall(r"^client \| (.*)", output, re.M)[-1]
    return "\n".join([f"{CHAPTER}: {last}", f"domain: {used[1]}, {used[2]}",
                      *([rate(output)[1]] if "bw=" in output else [])])


def pages(size, count):
    """Short runs say how long the real one has to be."""
    repeat, needed = 1, 400
    while True:
        gbps, said = rate(transfer("7_queue", size, count, repeat))
        if gbps:
            needed = SECONDS * gbps * 1e9 / 8 / size / count
        if repeat >= needed / 2:
            return said
        # The first of them are over before they have got going.
        repeat = int(min(needed, 20 * repeat)) + 1


def rules():
    """What the recorder says of 6_write on this adapter."""
    folder = tempfile.mkdtemp()
    try:
        output = run("scripts/watch/run.py", "-q", "-t", str(LIMIT - 20), "-o", folder,
                     f"{BUILD}/6_write")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return "\n".join(line for line in output.splitlines()
                     if not line.startswith(("Picture: ", "Not seen: ")))


# ---- The block ----

def report():
    """Yields labels and texts."""
    pieces = [("system", system), ("processor", processor), ("libfabric", libfabric),
              ("adapters", adapters), ("cards", cards), ("GPUs", gpus), ("limits", limits),
              ("settings", settings), ("interfaces", interfaces), ("demo", demo),
              *((f"7_queue {size}", lambda size=size, count=count: pages(size, count))
                for size, count in SIZES),
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
