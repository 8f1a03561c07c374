"""Measures 11_rails over several links of known speeds, and beside it what they can do.
The links are cables between two network namespaces, each as fast as `tc` lets it be
(tbf). For each set of links, in turn:
  11_rails   over all of them,
  dealt out  a 7_queue for each link, side by side, each with the same number of pages:
             done when the last one is done,
  iperf3     one for each link, side by side; their sum is what TCP gets through.

Variables:
  SETS     sets of links, in Mbit/s ("250 250,250 250,250,250 250,250,250,250
           250,250,250,50"). On two cores, links of 2 Gbit/s each can't be filled.
  SECONDS  that a transfer should take (3)
"""

import concurrent.futures
import os
import sys

import bench
from bench import ANY_CORE, BUILD, background, read_until, run, show

SETS = [[int(speed) for speed in links.split(",")] for links in os.environ.get(
    "SETS", "250 250,250 250,250,250 250,250,250,250 250,250,250,50").split()]
SECONDS = float(os.environ.get("SECONDS", 3))
PAGE_SIZE = 65536  # bytes
PAGES = 100


# ---- What is measured: all return Gbps ----

def measure_rails(writes, hosts):
    program = f"{BUILD}/11_rails"
    with background(ANY_CORE, "tcp", *hosts[0], program) as server:
        run(ANY_CORE, "tcp", *hosts[1], program, bench.server_address(server),
            str(PAGE_SIZE), str(PAGES), str(max(1, round(writes / PAGES))))
        return float(read_until(server, r"WRITE: 100%.* bw=([0-9.]+)Gbps")[1])


def measure_dealt_out(writes, hosts, cables):
    """Each 7_queue writes the same number of pages, so the slowest decides."""
    with concurrent.futures.ThreadPoolExecutor(cables) as pool:
        rates = pool.map(lambda cable: bench.measure_queue(
            "tcp", PAGE_SIZE, writes / cables, hosts=bench.over(cable, hosts),
            cores=(ANY_CORE, ANY_CORE)), range(cables))
        return min(rates) * cables * PAGE_SIZE * 8e-9


def measure_iperf3(ips, hosts):
    seconds = max(1, round(SECONDS))  # to iperf3, 0 means for ever
    with concurrent.futures.ThreadPoolExecutor(len(ips)) as pool:
        return sum(pool.map(lambda ip: bench.measure_iperf3(ip, seconds, hosts), ips)) * 1e-9


def main():
    bench.exit_on_signals()
    results = bench.Results("program", "links")
    rows = [["links, in Mbit/s", "11_rails", "dealt out", "iperf3", "/ iperf3", "/ links"]]
    try:
        for links in SETS:
            name = ", ".join(map(str, links))
            with bench.links([f"{speed}mbit" for speed in links]) as (rates, ips, hosts):
                writes = sum(rates) * SECONDS / 8 / PAGE_SIZE
                results.measure({
                    ("11_rails", name): lambda: measure_rails(writes, hosts),
                    ("dealt out", name): lambda: measure_dealt_out(writes, hosts, len(links)),
                    ("iperf3", name): lambda: measure_iperf3(ips, hosts)})
            medians = [results.median(program, name) for program in rows[0][1:4]]
            rows.append([name, *(show(median, 3) for median in medians),
                         show(results.ratio(("11_rails", name), ("iperf3", name))),
                         show(medians[0] / sum(links) * 1e3)])
    except OSError as error:
        sys.exit(f"no network namespaces here: {error}")
    bench.print_table("In Gbps, and as a share (medians):", rows)
    results.write("bench-rails")


if __name__ == "__main__":
    main()
