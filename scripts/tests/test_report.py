"""The block that make report prints."""

import getpass
import os
import re
import socket
import subprocess

from harness import BUILD, ROOT
from repository import make

HOST = socket.gethostname()
LABELS = ["system", "libfabric", "adapters", "GPUs", "settings", "interfaces", "7_queue 64",
          "7_queue 65536", "7_queue 1048576", "rules"]


def block_of(output):
    """The texts of a block, by their labels. None of them names this machine."""
    block = re.search(r"^---- Please send .*\n((?s:.*))^----$", output, re.M)[1]
    texts = {}
    for line in block.splitlines():
        label, text = line[:16].strip(), line[16:]
        if label:
            texts[label] = text
        else:
            texts[[*texts][-1]] += "\n" + text
    assert [*texts] == LABELS
    assert not re.search(rf"\b{re.escape(HOST)}\b", block), block
    assert not re.search(rf"\b{re.escape(getpass.getuser())}\b", block), block
    assert ROOT not in block and "/tmp" not in block, block
    # The kernel's version is as it is.
    numbers = block.partition("\n")[2]
    assert not re.search(r"\d+\.\d+\.\d+\.\d+|[0-9a-f]{12}|::", numbers), block
    return texts


def fake_nvidia_smi(folder, body):
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_report(tmp_path):
    env = fake_nvidia_smi(tmp_path, "echo 'A GPU, 1.2'; echo 'A GPU, 1.2'")
    texts = block_of(make("report", BUILD=BUILD, **env))
    assert "FAILED" not in "".join(texts.values()), texts
    assert texts["GPUs"] == "2 x A GPU, 1.2"
    assert re.match(r"\d+\.\d+\.\d+", texts["libfabric"])
    for label in LABELS[-4:-1]:
        provider = re.match(r"bw=\d+\.\d+Gbps, .*, provider: ([^,]+)$", texts[label])[1]
        assert texts["interfaces"].startswith(f"{provider}: "), texts
    assert texts["rules"].startswith("No violation seen in ")


def test_report_of_failures(tmp_path):
    """What fails is in the block, and names nothing either."""
    home = f"/home/{getpass.getuser()}/lib"
    env = fake_nvidia_smi(tmp_path, f"echo no driver on {HOST}; exit 9")
    done = subprocess.run(
        ["scripts/report.py"], cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE,
        env={**os.environ, **env, "FI_TCP_IFACE": "192.0.2.77",
             "FI_PROVIDER": f"none {HOST} fe80::1:2 {home} 0x7ffe12345678 02:00:5e:10:00:01"})
    texts = block_of(done.stdout)
    assert texts["GPUs"] == "FAILED: exit status 9\nno driver on (name)"
    assert texts["settings"].endswith(" FI_PROVIDER=none (name) (address) /home/(name)/lib "
                                      "(address) (address) FI_TCP_IFACE=(address)"), texts
    for label in LABELS[-5:]:
        assert texts[label].startswith("FAILED: exit status "), texts
        assert "fi_getinfo" in texts[label] or label == "rules", texts
