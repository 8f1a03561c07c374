"""Measures 10_lock: changes a second of the same memory by one, two and four clients,
by message to the server, by atomic operations, under the lock, and in the hash table.

Usage: scripts/bench/bench.sh --lock    (make bench-lock)

Variables:
  RUNS       the number of runs of each (3); the median counts
  COUNT      changes of each kind by each client (20000)
  PROVIDERS  as FI_PROVIDER takes them (by default those of shm, tcp, efa and
             verbs;ofi_rxm that are here)
  BUILD      the folder of the programs (build); the results are written there
"""

import contextlib
import csv
import os
import random
import re
import statistics

from bench import (ANY_CORE, BUILD, TIME_LIMIT, Progress, background, exit_on_signals,
                   providers_here, server_address)

RUNS = int(os.environ.get("RUNS", 3))
COUNT = os.environ.get("COUNT", "20000")
CLIENTS = [1, 2, 4]
PROGRAM = os.path.join(BUILD, "10_lock")
# What the lines of a client are about.
KINDS = {
    "messages and their answers": "message and answer",
    "entries by FETCH-AND-ADD and WRITE": "log, by FETCH-AND-ADD and WRITE",
    "changes under the lock": "ledger, under the lock",
    "records written, and as many read": "hash table, WRITE and READ",
}


def measure(provider, clients):
    """Returns the changes a second of all clients together, by kind."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(background(ANY_CORE, provider, PROGRAM))
        address = server_address(server)
        processes = [stack.enter_context(
            background(ANY_CORE, provider, PROGRAM, address, COUNT))
                     for _ in range(clients)]
        outputs = [process.stdout.read() for process in processes]
        for process, output in zip(processes, outputs):
            if process.wait(TIME_LIMIT) != 0:
                raise RuntimeError(output)
    rates = {}
    for kind in KINDS:
        found = [re.search(rf"^\[\d+\] \d+ {kind}: .* ([0-9.]+) us each$", output, re.M)
                 for output in outputs]
        rates[kind] = sum(1e6 / float(match[1]) for match in found)
    return rates


def main():
    exit_on_signals()
    providers = providers_here()
    steps = [(provider, clients) for provider in providers for clients in CLIENTS]
    results = {}
    progress = Progress(RUNS * len(steps))
    for _ in range(RUNS):
        for step in random.sample(steps, len(steps)):
            for kind, rate in measure(*step).items():
                results.setdefault((*step, kind), []).append(rate)
            progress.step(f"{step[0]}, {step[1]} clients")
    for provider in providers:
        print(f"\n{provider}, changes a second of all clients together (medians):")
        print(f"{'':<34}" + "".join(f"{n:>8} clients" for n in CLIENTS))
        for kind, name in KINDS.items():
            medians = [statistics.median(results[provider, n, kind]) for n in CLIENTS]
            print(f"{name:<34}" + "".join(f"{median:>16.0f}" for median in medians))
    path = os.path.join(BUILD, "bench-lock.csv")
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["provider", "clients", "kind", "run", "changes_per_second"])
        for key, rates in results.items():
            for number, rate in enumerate(rates, 1):
                writer.writerow([*key, number, f"{rate:.0f}"])
    print(f"\nWritten: {path} (all runs)")


if __name__ == "__main__":
    main()
