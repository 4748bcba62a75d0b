"""Two hosts as network namespaces, connected through a third one that is a switch.

A cut gives neither end of a connection an error: packets just stop.
"""

from __future__ import annotations

import os
import subprocess
import time
from typing import Final

ADDRESSES: Final = {"near": "10.77.0.1", "far": "10.77.0.2"}
CONGESTION_CONTROL: Final = "reno"  # available in every namespace; with BBR 1 of 100 outages took 9.5 s to resume
PLACES: Final = ("near", "far", "switch")  # where to cut; near and far: that host's own interface


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Hosts:
    """The two hosts and the switch, which exist during the `with` block."""

    def __init__(self) -> None:
        self.names = {side: f"rf-{side}-{os.getpid()}" for side in PLACES}

    def __enter__(self) -> Hosts:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _build(self) -> None:
        for name in self.names.values():
            ip("netns", "add", name)
        switch = self.names["switch"]
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for side, address in ADDRESSES.items():
            name = self.names[side]
            ip("-n", name, "link", "add", "cable", "type", "veth", "peer", "name", f"to-{side}", "netns", switch)
            ip("-n", switch, "link", "set", f"to-{side}", "master", "bridge", "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("netns", "exec", name, "sysctl", "--quiet", f"net.ipv4.tcp_congestion_control={CONGESTION_CONTROL}")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable", "up")

    def __exit__(self, *_: object) -> None:
        for name in self.names.values():
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)

    def prefix(self, side: str) -> list[str]:
        """Return the command prefix that runs a command on that host."""
        return ["ip", "netns", "exec", self.names[side]]

    def cut(self, place: str) -> float:
        """Cut the connection there; return the time."""
        moment = time.monotonic()
        self._set(place, "down")
        return moment

    def restore(self, place: str) -> float:
        """Restore the connection; return the time."""
        self._set(place, "up")
        return time.monotonic()

    def limit_retries(self, count: int) -> None:
        """Set tcp_retries2 on both hosts: how often the kernel probes a silent peer. The default is 15."""
        for side in ADDRESSES:
            ip("netns", "exec", self.names[side], "sysctl", "--quiet", f"net.ipv4.tcp_retries2={count}")

    def _set(self, place: str, state: str) -> None:
        device = "to-far" if place == "switch" else "cable"
        ip("-n", self.names[place], "link", "set", device, state)
