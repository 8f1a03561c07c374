"""Measures 11_rails over several links of known speeds, and beside it what they can do.

Usage: scripts/bench/bench.sh --rails   (make bench-rails)

The links are cables between two network namespaces, each as fast as `tc` lets it be
(tbf). For each set of links, in turn:
  11_rails   over all of them,
  dealt out  a 7_queue for each link, side by side, each with the same number of pages:
             done when the last one is done,
  iperf3     one for each link, side by side; their sum is what TCP gets through.

Targets:
  11_rails / iperf3   >= 0.97 over equal links, 0.95 with a slow one among them

Variables:
  RUNS     the number of runs of each (3); the median counts
  SETS     sets of links, in Mbit/s ("250 250,250 250,250,250 250,250,250,250
           250,250,250,50"). On two cores, links of 2 Gbit/s each can't be filled.
  SECONDS  that a transfer should take (3)
  BUILD    the folder of the programs (build); the results are written there
"""

import concurrent.futures
import os
import random
import sys

import bench
from bench import ANY_CORE, BUILD, background, read_until, run, show

SETS = [tuple(int(speed) for speed in links.split(",")) for links in os.environ.get(
    "SETS", "250 250,250 250,250,250 250,250,250,250 250,250,250,50").split()]
SECONDS = float(os.environ.get("SECONDS", 3))
IPERF_SECONDS = max(1, round(SECONDS))  # to iperf3, 0 means for ever
PAGE_SIZE = 65536  # bytes
PAGES = 100


def name_of(links):
    return ", ".join(map(str, links))


# ---- What is measured: all return Gbps ----

def measure_rails(writes, hosts):
    program = os.path.join(BUILD, "11_rails")
    with background(ANY_CORE, "tcp", *hosts[0], program) as server:
        read_until(server, "^Run the client")
        addresses = read_until(server, r" ([0-9a-f,]+)\n")[1]
        run(ANY_CORE, "tcp", *hosts[1], program, addresses, str(PAGE_SIZE), str(PAGES),
            str(max(1, round(writes / PAGES))))
        return float(read_until(server, r"WRITE: 100%.* bw=([0-9.]+)Gbps")[1])


def measure_dealt_out(writes, hosts, cables):
    """Each 7_queue writes the same number of pages, so the slowest decides."""
    share = max(PAGES, writes / cables)
    with concurrent.futures.ThreadPoolExecutor(cables) as pool:
        rates = pool.map(
            lambda cable: bench.measure_queue(
                "tcp", PAGE_SIZE, share, PAGES, hosts=bench.over(cable, hosts),
                cores=(ANY_CORE, ANY_CORE))[0], range(cables))
        return min(rates) * cables * PAGE_SIZE * 8e-9


def measure_iperf3(ips, hosts):
    with concurrent.futures.ThreadPoolExecutor(len(ips)) as pool:
        rates = pool.map(lambda ip: bench.measure_iperf3(ip, IPERF_SECONDS, hosts), ips)
        return sum(rates) * 1e-9


# ---- The benchmark ----

class Results(bench.Results):
    """In Gbps, by program, provider and links."""

    HEADER = ["program", "provider", "links", "run", "gbps"]

    def row(self, key, number, rate):
        return [*key, number, f"{rate:.4f}"]


def measure_set(results, links, progress):
    with bench.links([f"{speed}mbit" for speed in links]) as (rates, ips, hosts):
        writes = sum(rates) * SECONDS / 8 / PAGE_SIZE
        steps = {
            "11_rails": lambda: measure_rails(writes, hosts),
            "dealt out": lambda: measure_dealt_out(writes, hosts, len(links)),
            "iperf3": lambda: measure_iperf3(ips, hosts),
        }
        for _ in range(bench.RUNS):
            for program in random.sample(list(steps), len(steps)):
                results.add(program, "tcp", name_of(links), steps[program]())
                progress.step(f"{program} over {name_of(links)} Mbit/s")


def print_table(results):
    print("\nIn Gbps, and as a share (medians):")
    print(f"{'links, in Mbit/s':<22} {'11_rails':>9} {'dealt out':>9} {'iperf3':>9} "
          f"{'/ iperf3':>9} {'/ links':>9}")
    for links in SETS:
        name = name_of(links)
        rates = [results.median(program, "tcp", name)
                 for program in ["11_rails", "dealt out", "iperf3"]]
        shares = [results.ratio(("11_rails", "tcp", name), ("iperf3", "tcp", name)),
                  rates[0] / sum(links) * 1e3]
        print(f"{name:<22} " + " ".join(f"{rate:>9.3f}" for rate in rates) + " " +
              " ".join(f"{show(share):>9}" for share in shares))


def print_targets(results):
    rows = []
    for links in SETS:
        name = name_of(links)
        equal = len(set(links)) == 1
        rows.append((f"{name}: / iperf3", ">=", 0.97 if equal else 0.95,
                     results.ratio(("11_rails", "tcp", name), ("iperf3", "tcp", name))))
    bench.print_reached(rows)


def main():
    bench.exit_on_signals()
    if sys.argv[1:]:
        sys.exit(__doc__)
    results = Results()
    progress = bench.Progress(3 * bench.RUNS * len(SETS))
    try:
        for links in SETS:
            measure_set(results, links, progress)
    except OSError as error:
        sys.exit(f"no network namespaces here: {error}")
    print_table(results)
    print_targets(results)
    path = os.path.join(BUILD, "bench-rails.csv")
    results.write_csv(path)
    print(f"\nWritten: {path} (all runs)")


if __name__ == "__main__":
    main()
