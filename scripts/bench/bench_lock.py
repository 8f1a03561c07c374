"""Measures 10_lock: changes a second of the same memory by one, two and four clients,
by message to the server, by atomic operations, under the lock, and in the hash table.

Variable:
  COUNT  changes of each kind by each client (20000)
"""

import contextlib
import os
import re

import bench
from bench import ANY_CORE, BUILD, background, show

COUNT = os.environ.get("COUNT", "20000")
CLIENTS = [1, 2, 4]
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
        def start(*arguments):
            return stack.enter_context(
                background(ANY_CORE, provider, f"{BUILD}/10_lock", *arguments))
        address = bench.server_address(start())
        processes = [start(address, COUNT) for _ in range(clients)]
        outputs = [process.stdout.read() for process in processes]
        for process, output in zip(processes, outputs):
            if process.wait(bench.TIME_LIMIT) != 0:
                raise RuntimeError(output)
    return {name: sum(1e6 / float(re.search(
        rf"^\[\d+\] \d+ {kind}: .* ([0-9.]+) us each$", output, re.M)[1]) for output in outputs)
            for kind, name in KINDS.items()}


def main():
    bench.exit_on_signals()
    providers = bench.providers_here()
    results = bench.Results("provider", "clients", "kind")
    results.measure({(provider, clients): lambda p=provider, n=clients: measure(p, n)
                     for provider in providers for clients in CLIENTS})
    for provider in providers:
        bench.print_table(f"{provider}, changes a second of all clients together (medians):", [
            ["clients", *map(str, CLIENTS)],
            *([name, *(show(results.median(provider, n, name), 0) for n in CLIENTS)]
              for name in KINDS.values())])
    results.write("bench-lock")


if __name__ == "__main__":
    main()
