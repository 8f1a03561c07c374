"""Exercise 5: several texts in one turn. `5_reverse ADDRESS TEXT...` has each of
them reversed, with one CONNECT and one BYE."""

import re

import pytest

pytestmark = pytest.mark.builds("plain")


def lines_of(process, verb):
    """What it has printed of texts sent, or received, in that order."""
    return re.findall(rf"^{verb} [0-9]+ bytes: (.*)$", process.output, re.M)


def check(server, *texts):
    """A client with these texts, for which the server prints one CONNECT."""
    already = len(server.process.lines)
    client = server.start_client(*texts)
    status = client.wait()
    assert status == 0, client.output
    expected = list(texts) or ["Hello, world!"]
    assert lines_of(client, "Sent") == expected
    assert lines_of(client, "Received") == [text[::-1] for text in expected]
    assert client.output.count("The text is correct.\n") == 1
    assert client.output.endswith("The text is correct.\n")
    lines = server.process.lines[already:]
    assert lines.count("Received CONNECT message from client:\n") == 1
    assert lines.count("Sent them back reversed.\n") == len(expected)


@pytest.mark.parametrize("provider", ["", "shm"], ids=["default", "shm"])
def test_several_texts(serve, provider):
    server = serve("5_reverse", provider)
    check(server, "one", "two and a half", "3")
    check(server, *[f"text {i}" for i in range(20)])
    server.stop()


def test_one_text_and_none(serve):
    """As before."""
    server = serve("5_reverse")
    check(server)
    check(server, "just one")
    server.stop()


def test_empty_text(serve):
    """It is refused, wherever it stands."""
    server = serve("5_reverse")
    for texts in [[""], ["one", ""], ["", "two"]]:
        client = server.start_client(*texts)
        assert client.wait() == 2, client.output
        assert "TEXT is empty" in client.output
    server.stop()
