#!/usr/bin/env python3
"""Runs the server and the client of a program with the recorder, or the ranks of 15_ring,
and shows who owned what when, and what was wrong in that (make watch-6, make watch-5.3,
make watch-mine).

Usage: scripts/watch/run.py [-o FOLDER] [-q] [-t SECONDS] PROGRAM [CLIENT_ARGUMENT...]
       scripts/watch/run.py FOLDER [SOURCE]    what was recorded by hand
  -o  where the records and pictures go (build/watch/NAME)
  -q  prints only what was found
  -t  seconds, after which both are ended (60)
What the environment has goes to both. CLIENTS says how many run at once, and BEHIND names a
library to load behind watch.so, such as build/strict.so.

Exits with the status of the client, with 1 if a rule was broken."""

import argparse
import glob
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import draw  # noqa: E402
import model  # noqa: E402

BUILD = os.environ.get("BUILD") or "build"
# Arguments of clients: as much as a picture can show.
SMALL = {"7": ["4096", "500", "1"], "8": ["4"], "10": ["3"], "11": ["4096", "500", "1"],
         "13": ["3", "20"], "14": ["4096", "500", "1"]}


nobody_reads = threading.Event()  # what we print: `make watch-2 | head`


def may_wait(end):
    """Throws, as Ctrl-C does, when the time is over or nobody reads any more. (An interrupt
    by a thread might come while a process starts, and nobody would end that.)"""
    if nobody_reads.is_set() or time.monotonic() > end:
        raise KeyboardInterrupt
    time.sleep(0.02)


class Running:
    """A process, and what it has printed."""
    def __init__(self, command, name, folder, scratch, quiet):
        behind = [os.path.abspath(path) for path in os.environ.get("BEHIND", "").split()]
        preload = [os.path.abspath(f"{BUILD}/watch.so"), *behind, os.environ.get("LD_PRELOAD", "")]
        env = {"STRICT_DIR": scratch, **os.environ, "WATCH": folder,
               "LD_PRELOAD": " ".join(preload).strip()}
        self.lines, self.quiet = [], quiet
        self.popen = subprocess.Popen(command, env=env, universal_newlines=True, errors="replace",
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.thread = threading.Thread(target=self.read, args=(name, quiet), daemon=True)
        self.thread.start()

    def read(self, name, quiet):
        for line in self.popen.stdout:
            self.lines.append(line.rstrip("\n"))
            try:
                if not quiet:
                    print(f"{name} | {line}", end="", flush=True)
            except BrokenPipeError:
                quiet = True
                nobody_reads.set()

    def address(self, end):
        """Waits for what the server prints for its clients."""
        while True:
            lines = list(self.lines)
            for before, line in zip(lines, lines[1:]):
                if before.startswith("Run the client"):
                    return re.search(r"\b[0-9a-f]{16,}\b", line)[0]
            if self.popen.poll() is not None or time.monotonic() > end:
                self.popen.terminate()
                sys.exit("\n".join([*self.lines * self.quiet, (
                    "error: the server has printed no address. Start the processes by hand, each "
                    "with WATCH=build/run1 LD_PRELOAD=build/watch.so in front, and then type: "
                    "make watch DIR=build/run1")]))
            may_wait(end)

    def end(self):
        """Waits for its end, and kills it at last."""
        try:
            self.popen.wait(10)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self.thread.join(5)


def run(options, folder, scratch, source):
    """Runs them all. Returns the first status that is not 0, or 0."""
    number = re.match(r"\d*", os.path.basename(options.program))[0]
    arguments, server_arguments = options.arguments or SMALL.get(number, []), []
    if number == "9":
        server_arguments = [os.path.join(scratch, "received")]
        os.mkdir(server_arguments[0])
        if not arguments:
            arguments = [os.path.join(scratch, "demo.bin")]
            # Few slots: one can follow each of them. The first moves have only one.
            arguments += ["4"] * ("[SLOTS]" in source)
            with open(arguments[0], "wb") as file:
                file.write(os.urandom(12_000_000))
    end = time.monotonic() + options.t
    count = int(os.environ.get("CLIENTS") or 0)
    servers, clients = [], []

    def start(name, *command):
        return Running([options.program, *command], name, folder, scratch, options.q)
    try:
        if "FOLDER RANK N" in source:
            count = count or 3
            clients += [start(f"rank {rank}", f"{scratch}/run", str(rank), str(count),
                              *(arguments or ["1000000"])) for rank in range(count)]
        else:
            servers.append(start("server", *server_arguments))
            address = servers[0].address(end)
            clients += [start(f"client {i + 1}" if count > 1 else "client", address, *arguments)
                        for i in range(count or 1)]
        while any(client.popen.poll() is None for client in clients):
            may_wait(end)
        time.sleep(0.2)  # what the server still has to do for them
    except KeyboardInterrupt:
        pass  # what there is, is drawn
    finally:
        for process in clients + servers:
            process.popen.terminate()
        for process in clients + servers:
            process.end()
    return next((client.popen.returncode for client in clients if client.popen.returncode), 0)


def show(folder, source, quiet=False):
    """Draws the run in a folder, and prints what was found. Returns whether a rule was
    broken."""
    found = model.load(folder, source)
    if found is None:
        sys.exit(f"error: {folder} has no records: was WATCH set to it, and LD_PRELOAD to "
                 f"{BUILD}/watch.so?")
    lines = draw.write(found, folder)
    if not quiet:
        short = draw.shortened(lines)
        limit = 100
        print("", *short[:limit], sep="\n")
        if len(short) > limit:
            print(f"{'':15}  … and {len(short) - limit} lines more; all are in {folder}/trace.txt")
        print()
    lines = [*draw.summary(found), f"Picture: {folder}/page.html (also picture.svg, trace.txt)"]
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        lines = [textwrap.fill(line, width, subsequent_indent=" " * 7, break_on_hyphens=False)
                 for line in lines]
    print(*lines, sep="\n")
    return bool(found.wrongs)


def recorded(folder):
    """The source of a program that was recorded here, or ""."""
    for path in glob.glob(f"{folder}/*.watch"):
        for *_, text in model.records(path):
            return source_of(text.split(b"\0")[0].decode(errors="replace"))
    return ""


def source_of(program):
    """The source of a program, of the one whose variant it is, or of a move; or ""."""
    folder, name = os.path.split(program)
    return next((path for path in (f"{folder}/{name}.cpp", f"src/{name}.cpp",
                                   f"{folder}/moves/src/{name}.cpp") if os.path.exists(path)), "")


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("-o", default="")
    parser.add_argument("-q", action="store_true")
    parser.add_argument("-t", type=float, default=60)
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not os.path.exists(options.program):
        sys.exit(f"error: there is no {options.program}")
    if os.path.isdir(options.program):  # make watch DIR=...
        source = "".join(options.arguments) or recorded(options.program)
        sys.exit(show(options.program, source, options.q))
    folder = options.o or f"{BUILD}/watch/{os.path.basename(options.program)}"
    os.makedirs(folder, exist_ok=True)
    for old in glob.glob(f"{folder}/*.watch"):
        os.unlink(old)
    source = source_of(options.program)
    with tempfile.TemporaryDirectory() as scratch:
        status = run(options, folder, scratch,
                     source and pathlib.Path(source).read_text(encoding="utf-8"))
    wrong = show(folder, source, options.q)
    if status and not wrong:
        print("The client has failed, and this run shows no reason. Try what is not seen in it.")
    sys.exit(1 if wrong else status)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
