"""Exercise 4: immediate data. The length of the text travels beside the text, and
the server prints both: `Received 13 bytes (data: 13): Hello, world!`."""

import pytest


@pytest.mark.parametrize("provider", ["", "shm"], ids=["default", "shm"])
def test_length_comes_along(serve, provider):
    server = serve("4_hello", provider)
    for args in [[], ["x"], ["grüße"], ["0123456789" * 100]]:
        text = args[0] if args else "Hello, world!"
        size = len(text.encode())
        server.check_client(*args)
        line = server.process.wait_for(rf"^Received {size} bytes.*$", 5)[0]
        assert line == f"Received {size} bytes (data: {size}): {text}"
    server.stop()


def test_no_data_is_not_made_up(run, serve, build):
    """Somebody who sends a text alone: the server prints the text alone."""
    server = serve("4_hello")
    sender = run([f"{build}/sender", server.address], stdin=-1)
    sender.wait_for("^address")
    sender.write("send " + b"alone".hex())
    sender.wait_for("^sent")
    line = server.process.wait_for("^Received 5 bytes.*$", 5)[0]
    assert line == "Received 5 bytes: alone"
    server.stop()
