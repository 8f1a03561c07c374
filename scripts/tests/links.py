"""Two hosts with several links between them, and a host for the tests of one process:
network namespaces."""

import ctypes
import os
import shutil
import subprocess

import pytest

from harness import wait_until

# A page of 64 KiB takes 5 ms on a link.
MBITS = 100

CLONE_NEWNET = 0x40000000  # Python has no names for these before 3.12
# An adapter with an address that no network uses (RFC 5737), and no address of IPv6,
# which might be used only after a second or more.
OWN_NETWORK = """
link set lo up
link add eth0 type veth peer name far0
link set eth0 addrgenmode none up
link set far0 addrgenmode none up
address add 192.0.2.2/24 dev eth0
"""


def enter_own_network():
    """Moves this process, and with it all that it will start, to a network of its own,
    if the machine permits it. Where several processes test at a time, a new server gets
    the port of one that has just been killed now and then, and what clients still send
    there: 1 in 7,000 each time, but a client tries for 10 s."""
    libc = ctypes.CDLL(None)
    shared = os.open("/proc/self/ns/net", os.O_RDONLY)
    if shutil.which("ip") and libc.unshare(CLONE_NEWNET) == 0:
        done = subprocess.run(["ip", "-batch", "-"], input=OWN_NETWORK, text=True,
                              check=False, capture_output=True)
        if done.returncode != 0:
            libc.setns(shared, CLONE_NEWNET)
    os.close(shared)


class Network:
    """Two hosts, 0 and 1, and cables between them. The names of the links are those of
    the cables."""

    def __init__(self):
        self.hosts = [f"rails{os.getpid()}{side}" for side in "ab"]
        self.links = [(host, "lo") for host in (0, 1)]

    @staticmethod
    def call(*command):
        done = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)
        if done.returncode != 0:
            pytest.skip(f"not permitted here: {' '.join(command)}: {done.stdout.strip()}")
        return done.stdout

    def ip(self, host, *args):
        self.call("ip", "-n", self.hosts[host], *args)

    def open(self):
        for host in 0, 1:
            self.call("ip", "netns", "add", self.hosts[host])
            # Otherwise an address of IPv6 may be used only after a second or more.
            self.call("ip", "netns", "exec", self.hosts[host], "bash", "-c",
                      "echo 0 | tee /proc/sys/net/ipv6/conf/*/accept_dad")
            self.ip(host, "link", "set", "lo", "up")

    def close(self):
        for host in self.hosts:
            subprocess.run(["ip", "netns", "delete", host], check=False,
                           capture_output=True)

    def plug(self, cable, *addresses, mbits=None):
        """Lays a cable between the hosts, with these addresses at its ends."""
        self.call("ip", "link", "add", cable, "netns", self.hosts[0], "type", "veth",
                  "peer", "name", cable, "netns", self.hosts[1])
        for host, address in enumerate(addresses):
            self.ip(host, "address", "add", address, "dev", cable)
            self.up(host, cable)
            if mbits:
                self.limit(host, cable, mbits)

    def plug_all(self, count=4, mbits=MBITS):
        """Lays so many cables, each in a network of its own: link1, link2 ..."""
        for i in range(1, count + 1):
            self.plug(f"link{i}", f"10.11.{i}.1/24", f"10.11.{i}.2/24", mbits=mbits)

    def limit(self, host, cable, mbits):
        self.call("ip", "netns", "exec", self.hosts[host], "tc", "qdisc", "replace",
                  "dev", cable, "root", "tbf", "rate", f"{mbits}mbit", "burst", "64kb",
                  "latency", "50ms")

    def up(self, host, cable):
        self.ip(host, "link", "set", cable, "up")
        self.links.append((host, cable))

    def wait(self):
        """It takes a moment until a link carries anything."""
        for host, cable in self.links:
            def carries(link=("ip", "-n", self.hosts[host], "link", "show", cable)):
                found = self.call(*link)
                return "LOWER_UP" in found and "state DOWN" not in found
            wait_until(carries)

    def down(self, host, cable):
        self.ip(host, "link", "set", cable, "down")
