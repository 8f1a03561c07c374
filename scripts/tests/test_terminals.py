"""The README's figure of two terminals, chapters/0_terminals.svg, shows what the program
prints. Its lines are changed by hand."""

import signal
import xml.etree.ElementTree

from chapters import normalised, read
from harness import address_of, BUILD
from repository import ROOT

SVG = "{http://www.w3.org/2000/svg}"


def test_terminals(run, monkeypatch):
    # With libfabric's own choice of a provider, as in the chapters.
    monkeypatch.delenv("FI_PROVIDER", raising=False)
    root = xml.etree.ElementTree.fromstring(read(f"{ROOT}/chapters/0_terminals.svg"))
    server = run([f"./{BUILD}/6_write"])
    client = run([f"./{BUILD}/6_write", address_of(server)])
    assert client.wait() == 0
    server.wait_for("Done")
    server.signal(signal.SIGINT)
    server.wait()
    for side, process in ("server", server), ("client", client):
        command, *shown = ["".join(line.itertext()) for line in
                           root.find(f"{SVG}g[@id='{side}']")]
        assert command.startswith("$ ./build/6_write")
        # An address that has been shortened is still an address.
        assert normalised(line.replace("…", 16 * "0") for line in shown) == normalised(
            process.output.replace(f"./{BUILD}/", "./build/").splitlines()), side
