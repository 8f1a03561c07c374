"""Exercise 5: several texts in one session. `5_reverse ADDRESS TEXT...` has each
of them reversed, with one CONNECT and one BYE."""

import re

import pytest


def lines_of(process, verb):
    """Returns the texts that the client has printed after this verb, in order."""
    return re.findall(rf"^{verb} [0-9]+ bytes: (.*)$", process.output, re.M)


def check(server, *texts):
    """Runs a client with these texts. The server must show one session for it."""
    already = len(server.process.lines)
    client = server.start_client(*texts)
    status = client.wait()
    assert status == 0, client.output
    expected = list(texts) or ["Hello, world!"]
    assert lines_of(client, "Sending") == expected
    assert lines_of(client, "Received") == [text[::-1] for text in expected]
    assert client.output.count("The text is correct.\n") == 1
    assert client.output.endswith("The text is correct.\n")
    server.process.wait_for(r"^\[[0-9]+\] Done\.$", after=already)
    lines = server.process.lines[already:]
    assert len({line.split()[0] for line in lines}) == 1, lines
    said = [line.split(" ", 1)[1] for line in lines]
    assert said[0].startswith("Received CONNECT message from client ")
    assert said[1:-1] == [f"Received {len(text)} bytes: {text}\n" for text in expected]
    assert said[-1] == "Done.\n"


@pytest.mark.parametrize("provider", ["", "shm"], ids=["default", "shm"])
def test_several_texts(serve, provider):
    server = serve("5_reverse", provider)
    check(server, "one", "two and a half", "3")
    check(server, *[f"text {i}" for i in range(20)])
    server.stop()


def test_one_text_and_none(serve):
    """One text still works, and no text still means the default."""
    server = serve("5_reverse")
    check(server)
    check(server, "just one")
    server.stop()


def test_empty_text(serve):
    """An empty text is refused, in whichever place it is."""
    server = serve("5_reverse")
    for texts in [[""], ["one", ""], ["", "two"]]:
        client = server.start_client(*texts)
        assert client.wait() == 2, client.output
        assert "TEXT is empty" in client.output
    server.stop()
