"""Where the time of a sealed collective goes: ringfence with the clocks of its data plane switched on.

    seal, open      AES-256-GCM, tags of forwarded frames included
    lock            what those calls took beyond their CPU time: the interpreter's lock, or a core, had to be got back
    reduce          the addition
    send, receive   system calls on sockets
    wait            in epoll, because nothing could be done
    rest            everything else, most of it Python

On device tensors, `runtime/staging_times.py` has the stages of the copies between host and device.

Only the compiled data plane has clocks; they are off unless this switches them on.
"""

from __future__ import annotations

import time
from time import perf_counter_ns
from typing import Any, Final

from ringfence.dataplane import info, native
from ringfence.errors import ConfigurationError
from ringfence.runtime import staging_times
from ringfence.runtime.engine import Engine
from ringfence.session.session import Session
from ringfence_lab.bench.names import STAGES

_SETTLE_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 1e-3


class Stages:
    """Nanoseconds by stage, between `start` and `stop`."""

    def __init__(self, network: Any) -> None:
        if not native.COMPILED:
            raise ConfigurationError(f"a profile needs the compiled data plane; {info.SLOWER}")
        self._waited = 0
        self._poll = network.poll
        network.poll = self._timed_poll  # the loop polls this very object

    def _timed_poll(self, seconds: float) -> None:
        start = perf_counter_ns()
        try:
            self._poll(seconds)
        finally:
            self._waited += perf_counter_ns() - start

    def start(self) -> None:
        self._waited = 0
        native.stages(True)

    def stop(self) -> dict[str, int]:
        spent = {**native.stages(False), "wait": self._waited}
        return {stage: spent[stage] for stage in STAGES}


class ProfiledEngine(Engine):
    """An engine that measures its stages."""

    def __init__(self, *, network: Any, **others: Any) -> None:
        self.stages = Stages(network)
        super().__init__(network=network, **others)


class ProfiledSession(Session):
    """A session that seals, with clocks."""

    engine_type = ProfiledEngine


def recorded_staging() -> dict[str, int]:
    """Stop the clocks of staging; return nanoseconds by stage, and the numbers of calls and passes.

    The device thread notes the end of a call a little after the device has its results.
    """
    staging_times.stop()
    deadline = time.monotonic() + _SETTLE_SECONDS
    while not staging_times.is_complete() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return staging_times.totals()
