"""Hosts as network namespaces: each is connected to a bridge by a veth pair whose two ends are limited to a rate.

    host 0: 10.83.0.1 ──veth, tbf──┐
    host 1: 10.83.0.2 ──veth, tbf──┤ bridge, in a namespace of its own
    …                              ┘

Both directions are limited: what a host sends, at its own end; what it receives, at the bridge's end. A long link has a relay
in place of the bridge (`relay.py`): then the rate limits what a host sends.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from ringfence.errors import ConfigurationError
from ringfence_lab.bench.relay import MTU, LongLink, Relay
from ringfence_lab.bench.worker_pool import Placement

_INTERFACE: Final = "rf"
_UNITS: Final = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_LOWEST_RATE: Final = 1000  # what is 0 bytes a second to the kernel is refused by it
_BURST_SECONDS: Final = 0.002  # at full rate, never under a few of the largest packets that the kernel hands over
_SMALLEST_BURST: Final = 256 * 1024
_QUEUE: Final = "50ms"
_LONG_BUFFER: Final = 64 << 20  # bytes of a socket, at most: 5 Gbit/s and 100 ms of round trip


def bits_per_second(rate: str) -> int:
    """Parse a rate such as "2.5gbit" into bits per second.

    Raises ConfigurationError.
    """
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(kbit|mbit|gbit)", rate.lower())
    bits = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if bits < _LOWEST_RATE:
        raise ConfigurationError(f"--rate {rate}: write a rate such as 1gbit or 2.5gbit")
    return bits


def burst_bytes(rate: str) -> int:
    """Return the burst of the rate limit, in bytes. Messages that fit in it are not slowed, so it is printed."""
    return max(_SMALLEST_BURST, int(bits_per_second(rate) / 8 * _BURST_SECONDS))


def available() -> bool:
    """Return whether this process can make network namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None


class Hosts:
    """`count` hosts. A context manager: leaving it removes them."""

    def __init__(self, count: int, rate: str | None, link: LongLink | None = None) -> None:
        if not available():
            raise ConfigurationError("--hosts makes network namespaces: it needs root and iproute2 (ip, tc)")
        self._rate = rate
        self._link = link
        self.relay: Relay | None = None  # of a long link
        self._bridge = f"rfb{os.getpid()}-bridge"
        self._names = [f"rfb{os.getpid()}-{number}" for number in range(count)]
        if rate is not None:
            bits_per_second(rate)

    def placements(self, workers: int) -> list[Placement]:
        """Return the placements of `workers` workers, distributed over the hosts in order of rank."""
        count = len(self._names)
        homes = [rank * count // workers for rank in range(workers)]
        return [Placement(("ip", "netns", "exec", self._names[home]), _address(home), _INTERFACE) for home in homes]

    @property
    def ends(self) -> list[tuple[str, str]]:
        """The network namespace and the address of each host."""
        return [(name, _address(number)) for number, name in enumerate(self._names)]

    def __enter__(self) -> Self:
        _remove_orphans()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _build(self) -> None:
        for name in self._names:
            run(f"ip netns add {name}")
            run(f"ip -n {name} link set lo up")
        if self._link is None:
            self._build_bridge()
        else:
            self._build_relay(self._link)

    def _build_relay(self, link: LongLink) -> None:
        self.relay = Relay(self.ends, _INTERFACE, link)
        for name, address in self.ends:
            run(f"ip -n {name} link set {_INTERFACE} mtu {MTU} txqueuelen 4000")
            run(f"ip -n {name} address add {address}/16 dev {_INTERFACE}")
            run(f"ip -n {name} link set {_INTERFACE} up")
            for limits in (f"tcp_rmem=4096 131072 {_LONG_BUFFER}", f"tcp_wmem=4096 16384 {_LONG_BUFFER}"):
                run(["ip", "netns", "exec", name, "sysctl", "-qw", f"net.ipv4.{limits}"])
            if self._rate is not None:
                run(f"tc -n {name} qdisc add dev {_INTERFACE} {self._limit()}")

    def _limit(self) -> str:
        assert self._rate is not None
        return f"root tbf rate {self._rate} burst {burst_bytes(self._rate)} latency {_QUEUE}"

    def _build_bridge(self) -> None:
        bridge = self._bridge
        run(f"ip netns add {bridge}")
        run(f"ip -n {bridge} link add bridge type bridge")
        run(f"ip -n {bridge} link set bridge up")
        for number, name in enumerate(self._names):
            port = f"port{number}"
            run(f"ip -n {name} link add {_INTERFACE} type veth peer name {port} netns {bridge}")
            run(f"ip -n {bridge} link set {port} master bridge up")
            run(f"ip -n {name} address add {_address(number)}/16 dev {_INTERFACE}")
            run(f"ip -n {name} link set {_INTERFACE} up")
            if self._rate is not None:
                run(f"tc -n {name} qdisc add dev {_INTERFACE} {self._limit()}")
                run(f"tc -n {bridge} qdisc add dev {port} {self._limit()}")

    def _remove(self) -> None:
        if self.relay is not None:
            self.relay.close()
            self.relay = None
        for name in (*self._names, self._bridge):
            run(f"ip netns delete {name}", check=False)


def _remove_orphans() -> None:
    """Remove the namespaces of benchmarks that were killed; a name contains the id of the process."""
    for name, process in re.findall(r"^(rfb([0-9]+)-\S+)", run("ip netns list", check=False), re.M):
        if not Path("/proc", process).exists():
            run(f"ip netns delete {name}", check=False)


def _address(number: int) -> str:
    return f"10.83.{number // 250}.{number % 250 + 1}"


def run(command: str | Sequence[str], check: bool = True, given: str | None = None) -> str:
    """Run a command, a text if no word of it has spaces; return what it prints. Raises ConfigurationError if it fails."""
    words = command.split() if isinstance(command, str) else command
    done = subprocess.run(words, check=False, capture_output=True, text=True, input=given)  # noqa: S603
    if check and done.returncode:
        raise ConfigurationError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout.strip()
