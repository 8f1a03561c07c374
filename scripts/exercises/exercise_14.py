"""Exercise 14: an address has one place at a time. Another CONNECT from there is told to
wait, and served when the place is free."""

import pytest

from fakes import FakeClient
from messages import BYE, WAIT, base, type_and_nonce


@pytest.mark.parametrize("provider", ["", "shm"], ids=["default", "shm"])
def test_one_place(run, serve, provider):
    server = serve("14_strangers", provider)
    client = FakeClient(run, server)
    client.open_session()
    first = client.nonce, client.session
    client.renew()
    client.peer(server.address)
    client.send(client.connect())
    assert type_and_nonce(client.receive_any()) == (WAIT, client.nonce)
    assert server.process.output.count("Received CONNECT") == 1
    # All others have their places, as ever.
    server.check_client("4096", "10", "1")
    client.nonce = first[0]
    client.peer(first[1])
    client.send(base(BYE))
    client.expect("Done")
    client.open_session()
    server.stop()
