"""Exercise 6: count instead of wait. Every WRITE carries the immediate data, and
the client counts them: `Received 8 RDMA WRITEs to local memory.`."""

import re

import pytest


@pytest.mark.parametrize("provider", ["", "shm"], ids=["default", "shm"])
def test_count(serve, provider):
    """There are as many WRITEs as pages."""
    server = serve("6_write", provider)
    for args, count in [([], 8), (["4096", "3"], 3), (["64", "1"], 1),
                        (["65536", "800"], 800)]:
        client = server.check_client(*args)
        lines = re.findall("^Received .*$", client.output, re.M)
        assert lines == [f"Received {count} RDMA WRITEs to local memory."]
    server.stop()
