#!/usr/bin/env python3
"""Runs a server and a client of 6_write, and draws what their two terminals show into
chapters/0_terminals.svg. The figure moves: both commands are typed, and the lines
appear in the order in which the programs printed them. The text is that of the run, but
the pace is not, because a run is over before anybody could read it.

Usage: make 6_write && scripts/book/terminals.py
"""

import os
import re
import signal
import subprocess
import threading
import time
from xml.sax.saxutils import escape

ROOT = os.path.abspath(f"{os.path.dirname(__file__)}/../..")
FIGURE = f"{ROOT}/chapters/0_terminals.svg"
PROGRAM = "./build/6_write"
SIDES = ["server", "client"]
ADDRESS = re.compile(r"\b[0-9a-f]{16,}\b")

# Seconds of the figure, before a letter, before a line, and before a command.
LETTER, LINE, COMMAND = 0.06, 0.4, 0.8
# Units of the figure. Letters are at most 0.62 times as wide as their font is high.
COLUMNS, FONT, ROW, BAR, PAD, GAP = 68, 16.5, 23, 28, 12, 10
WIDTH = 720

# Everything is visible, except while an animation waits for its turn. So the last
# picture is what remains, and what a viewer without animations shows.
STYLE = """
    .back { fill: #f6f8fa; stroke: #d0d7de }
    text { fill: #1f2328 }
    .bar { fill: #eaeef2; stroke: #d0d7de }
    .name { font: 14px Helvetica, Arial, sans-serif }
    .name, .prompt { fill: #59636e }
    .typed, .good { font-weight: 600 }
    .good { fill: #1a7f37 }
    .later { animation: wait 1ms backwards }
    @keyframes wait { from { visibility: hidden } }
    @media (prefers-reduced-motion: reduce) { .later { animation: none } }
    @media (prefers-color-scheme: dark) {
      .back { fill: #0d1117; stroke: #3d444d }
      text { fill: #e6edf3 }
      .bar { fill: #212830; stroke: #3d444d }
      .name, .prompt { fill: #9198a1 }
      .good { fill: #3fb950 }
    }"""


def record():
    """Runs a server and a client. Returns what appears in their terminals, in this
    order: (time, side, text)."""
    # With libfabric's own choice of a provider, as in the chapters.
    env = {name: value for name, value in os.environ.items()
           if not name.startswith("FI_")}
    recorded, processes, readers = [], [], []

    def read(side, pipe):
        for line in pipe:
            recorded.append((time.monotonic(), side, line.rstrip("\n")))

    def start(side, command):
        recorded.append((time.monotonic(), side, f"$ {command}"))
        processes.append(subprocess.Popen(
            command.split(), cwd=ROOT, env=env, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        readers.append(threading.Thread(target=read, args=(side, processes[-1].stdout)))
        readers[-1].start()

    def wait_for(side, pattern):
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for _, by, text in list(recorded):
                if by == side and re.fullmatch(pattern, text):
                    return text
            time.sleep(0.01)
        raise TimeoutError(f"the {side} has not printed {pattern!r}: {recorded}")

    try:
        start("server", PROGRAM)
        command = wait_for("server", rf"  {re.escape(PROGRAM)} [0-9a-f]+")
        start("client", command.strip())
        wait_for("client", r"Data is correct\.")
        wait_for("server", r"\[1\] Done: 8 pages written\.")
    finally:
        # The client has ended by itself if all went well.
        for process in reversed(processes):
            process.send_signal(signal.SIGINT)
            process.wait(10)
        for reader in readers:
            reader.join()
    return recorded


def fit(text):
    """Shortens an address where the line is too long for its terminal."""
    too_many = len(text) - COLUMNS
    if too_many > 0:
        text = ADDRESS.sub(lambda match: match[0][:-too_many - 1] + "…", text)
    if len(text) > COLUMNS:
        raise ValueError(f"more than {COLUMNS} columns: {text}")
    return text


def later(seconds, text, kind="later"):
    """A part of the figure that appears after so many seconds."""
    return (f'<tspan class="{kind}" style="animation-delay:{seconds:.2f}s">'
            f"{escape(text)}</tspan>")


def draw(recorded):
    """Returns the figure of a run."""
    lines = {side: [] for side in SIDES}
    now = 0.0
    for _, side, text in recorded:
        text = fit(text)
        if text.startswith("$ "):
            now += COMMAND
            line = '<tspan class="prompt">$ </tspan><tspan class="typed">'
            # Letter by letter, but the address is pasted.
            for part in re.findall(ADDRESS.pattern + "|.", text[2:]):
                now += LETTER
                line += later(now, part)
            line += "</tspan>"
        else:
            now += LINE
            good = text == "Data is correct."
            line = later(now, text, "good later" if good else "later")
        lines[side].append(line)

    took = recorded[-1][0] - recorded[0][0]
    parts = [f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 WIDTH HEIGHT" width="WIDTH" height="HEIGHT" role="img" aria-labelledby="title desc" font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', monospace" font-size="{FONT}">
  <!-- Drawn by scripts/book/terminals.py from a real run, which took {took:.2f} s. The
       text is that of the run, but the figure is slowed down to {now:.0f} s. It plays once. -->
  <title id="title">Two terminals: a server writes into the memory of its client</title>
  <desc id="desc">Above, the terminal of the server. It prints the command that starts
    a client, receives its request, and writes 8 pages. Below, the terminal of the
    client. It asks for the pages, is told that they are in its memory, and prints at
    last: Data is correct.</desc>
  <style>{STYLE}
  </style>"""]
    top = 1
    for side in SIDES:
        height = BAR + PAD + ROW * len(lines[side])
        parts.append(f"""\
  <rect class="back" x="1" y="{top}" width="{WIDTH - 2}" height="{height}" rx="8"/>
  <path class="bar" d="M1 {top + BAR} v{8 - BAR} a8 8 0 0 1 8 -8 h{WIDTH - 18} a8 8 0 0 1 8 8 v{BAR - 8} z"/>
  <text class="name typed" x="{PAD}" y="{top + 19}">{side}</text>
  <g id="{side}">""")
        for row, line in enumerate(lines[side], 1):
            parts.append(f'    <text x="{PAD}" y="{top + BAR + row * ROW}" '
                         f'xml:space="preserve">{line}</text>')
        parts.append("  </g>")
        top += height + GAP
    parts.append(f'  <text class="name" x="{WIDTH - PAD}" y="20" text-anchor="end">'
                 "a real run, slowed down</text>")
    svg = "\n".join(parts) + "\n</svg>\n"
    return svg.replace("HEIGHT", str(top - GAP + 1)).replace("WIDTH", str(WIDTH))


def main():
    with open(FIGURE, "w", encoding="utf-8") as file:
        file.write(draw(record()))


if __name__ == "__main__":
    main()
