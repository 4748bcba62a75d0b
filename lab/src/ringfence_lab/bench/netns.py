"""Hosts as network namespaces: each is connected to a bridge by a veth pair whose two ends are limited to a rate.

    host 0: 10.83.0.1 ──veth, tbf──┐
    host 1: 10.83.0.2 ──veth, tbf──┤ bridge, in a namespace of its own
    …                              ┘

Both directions are limited: what a host sends, at its own end; what it receives, at the bridge's end.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final, Self

from ringfence.errors import ConfigurationError
from ringfence_lab.bench.worker_pool import Placement

_INTERFACE: Final = "rf"
_UNITS: Final = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_LOWEST_RATE: Final = 1000  # what is 0 bytes a second to the kernel is refused by it
_BURST_SECONDS: Final = 0.002  # at full rate, never under a few of the largest packets that the kernel hands over
_SMALLEST_BURST: Final = 256 * 1024
_QUEUE: Final = "50ms"


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

    def __init__(self, count: int, rate: str | None) -> None:
        if not available():
            raise ConfigurationError("--hosts makes network namespaces: it needs root and iproute2 (ip, tc)")
        self._rate = rate
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
        except BaseException as error:
            self._remove()
            if isinstance(error, subprocess.CalledProcessError):
                raise ConfigurationError(f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}") from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _build(self) -> None:
        bridge = self._bridge
        _run(f"ip netns add {bridge}")
        _run(f"ip -n {bridge} link add bridge type bridge")
        _run(f"ip -n {bridge} link set bridge up")
        for number, name in enumerate(self._names):
            port = f"port{number}"
            _run(f"ip netns add {name}")
            _run(f"ip -n {name} link add {_INTERFACE} type veth peer name {port} netns {bridge}")
            _run(f"ip -n {bridge} link set {port} master bridge up")
            _run(f"ip -n {name} address add {_address(number)}/16 dev {_INTERFACE}")
            _run(f"ip -n {name} link set lo up")
            _run(f"ip -n {name} link set {_INTERFACE} up")
            if self._rate is not None:
                limit = f"root tbf rate {self._rate} burst {burst_bytes(self._rate)} latency {_QUEUE}"
                _run(f"tc -n {name} qdisc add dev {_INTERFACE} {limit}")
                _run(f"tc -n {bridge} qdisc add dev {port} {limit}")

    def _remove(self) -> None:
        for name in (*self._names, self._bridge):
            _run(f"ip netns delete {name}", check=False)


def _remove_orphans() -> None:
    """Remove the namespaces of benchmarks that were killed; a name contains the id of the process."""
    for name, process in re.findall(r"^(rfb([0-9]+)-\S+)", _run("ip netns list", check=False), re.M):
        if not Path("/proc", process).exists():
            _run(f"ip netns delete {name}", check=False)


def _address(number: int) -> str:
    return f"10.83.{number // 250}.{number % 250 + 1}"


def _run(command: str, check: bool = True) -> str:
    """Run a command whose words have no spaces in them; return what it prints."""
    return subprocess.run(command.split(), check=check, capture_output=True, text=True).stdout  # noqa: S603
