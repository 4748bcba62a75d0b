"""A long link between network namespaces: a program that passes packets on with delay, jitter and loss (`csrc/relay.cpp`).

    host 0: 10.83.0.1 ──TUN──┐
    host 1: 10.83.0.2 ──TUN──┤ the relay, one process
    …                        ┘

The kernel has neither to be configured nor to have netem. The relay takes a core's time for each packet, so packets are large.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from ringfence.errors import ConfigurationError
from ringfence_lab.accelerator import build

MTU: Final = 9000
_SOURCE: Final = Path(__file__).parent / "csrc" / "relay.cpp"
_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LEAVING_SECONDS: Final = 10.0
_SEED: Final = "1"  # the same packets are lost in every run


class LongLink(NamedTuple):
    """What every packet between two hosts meets, in each direction."""

    delay: float = 0.0  #  seconds
    jitter: float = 0.0  # seconds by which the delay is shorter or longer at most; packets do not overtake each other
    loss: float = 0.0  #   the share of packets that are lost

    def text(self) -> str:
        return f"{self.delay * 1e3:g} ms ± {self.jitter * 1e3:g} ms, loss {self.loss * 100:g} %"


def seconds_of(text: str) -> float:
    """Parse a time such as "50ms". Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)(us|ms|s)", text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 1e9
    if seconds > 10:
        raise ValueError(f"{text!r}: write a time of at most ten seconds, such as 50ms")
    return seconds


def share_of(text: str) -> float:
    """Parse a share such as "0.1%". Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,2}(?:\.[0-9]{1,6})?)%", text)
    if match is None:
        raise ValueError(f"{text!r}: write a share such as 0.1%")
    return float(match[1]) / 100


class Counters(NamedTuple):
    """What a relay has done so far."""

    packets: int
    bytes: int
    lost: int  #    as asked
    dropped: int  # since its memory was full, or the kernel took no more
    cpu: float  #   seconds


class Relay:
    """The process of a relay, with a device named `interface` in each namespace. It ends with `close`, or this process."""

    def __init__(self, ends: Sequence[tuple[str, str]], interface: str, link: LongLink) -> None:
        if link.jitter > link.delay:
            raise ConfigurationError("--jitter must not be longer than --delay")
        words = (f"{link.delay * 1e9:.0f}", f"{link.jitter * 1e9:.0f}", f"{link.loss:.9f}", _SEED, interface)
        command = [str(build.program(_SOURCE)), *words, *(word for end in ends for word in end)]
        self._process = subprocess.Popen(  # noqa: S603 - the program that was built above
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        if self._line() != "ready\n":
            _, error = self._process.communicate()
            raise ConfigurationError(f"the relay of the long link could not start: {error.strip()}")

    def counters(self) -> Counters:
        """Ask the relay what it has done."""
        _pipe(self._process.stdin).write("?\n")
        _pipe(self._process.stdin).flush()
        answer: dict[str, Any] = json.loads(self._line())
        return Counters(**answer)

    def _line(self) -> str:
        return _pipe(self._process.stdout).readline()

    def close(self) -> None:
        """End the relay: its devices go with it."""
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            _pipe(pipe).close()
        try:
            self._process.wait(_LEAVING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
