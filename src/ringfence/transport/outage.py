"""TCP through an outage: a connection lives until its peer has not answered for the outage timeout, and goes on soon after.

TCP resumes by itself. Three of its limits stand in the way (docs/guides/outages.md has the measurements):

- It gives up after a number of retransmissions. TCP_USER_TIMEOUT replaces that by a time.
- It retransmits ever more rarely, up to every 120 s. TCP_RTO_MAX_MS limits the pause, from Linux 6.15 on.
- Where nothing is in flight and the next segment cannot leave, because the peer does not read or this machine has no route, it
  sends probes instead, gives up after `tcp_retries2` of them, and counts a peer that answers but does not read as silent.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Protocol

UNANSWERED: Final = frozenset(
    {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
)  # what the kernel says when a peer does not answer, or when there is no route to it

_TCP_RTO_MAX_MS: Final = 44
_PAUSE_MS: Final = 1000  # between retransmissions, so that a run goes on soon; the kernel allows no less
_ENDLESS_MS: Final = 1 << 30  # of TCP_USER_TIMEOUT: 12 days
_LOOK_SECONDS: Final = 1.0
_QUICK_PROBES: Final = 2  # one in so many; the others are spread over the outage timeout
_QUICK_KEEPALIVE: Final = 1  # seconds between these, on a connection that is idle
_ESTABLISHED: Final = 1
_INFO_BYTES: Final = 148  # of struct tcp_info, up to tcpi_notsent_bytes
_DIALS: Final = 2  # retransmitted SYNs before the kernel reports a timeout; then the worker dials again


class Handler(Protocol):
    """Whom the network tells of what happens on a connection."""

    served_always: bool  # also while no collective is under way
    worker: int  # at the other end; -1: none, or not known yet

    def notify(self, readable: bool, writable: bool, ended: bool = False) -> None: ...


class TcpState(NamedTuple):
    """What the kernel knows of a connection."""

    state: int
    probes: int  # sent since the last answer
    in_flight: int  # segments
    silent: float  # seconds since anything came from the peer
    unsent: int  # bytes

    @classmethod
    def of(cls, stream: socket.socket) -> TcpState:
        raw = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        in_flight, data, answer, unsent = (struct.unpack_from("=I", raw, offset)[0] for offset in (24, 52, 56, 144))
        # A connection on which only data comes in has no answers: there is nothing to answer.
        return cls(raw[0], raw[3], in_flight, min(data, answer) / 1000, unsent)

    @property
    def probing(self) -> bool:
        """Something is to be sent, and TCP sends probes in its place."""
        return self.unsent > 0 and self.in_flight == 0


class _Options(NamedTuple):
    """What is set on a connection: milliseconds, milliseconds, seconds."""

    user_timeout: int
    retransmit: int
    keepalive: int


def is_unanswered(error: BaseException | None) -> bool:
    """Whether an OSError that says so is this error or the cause of it."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error is not None and error.errno in UNANSWERED


def tolerate(stream: socket.socket, seconds: float) -> None:
    """Have the kernel end this connection when the peer has not answered for so long, and not before."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1000))
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, min(3, round(seconds / 3))))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, keepalive_seconds(seconds))


def keepalive_seconds(outage: float) -> int:
    """Between two probes: they count towards `tcp_retries2` where later on segments cannot leave, so there are about 10."""
    return max(1, round(outage / 10))


def dial_briefly(stream: socket.socket) -> None:
    """Have `connect` fail after some seconds without an answer: dialling again is quicker than TCP's doubling pauses."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, _DIALS)


class OutageWatch(threading.Thread):
    """Looks at each connection every second, and sets what TCP needs to live through an outage and to go on soon after it.

    `on_outage` is called once a peer to which nothing is being sent has left a keepalive unanswered, so that something is:
    without it, a sender that missed the news of its peer's open window learns of it only by its own rare probes. `on_silence`
    is called with a worker that has not answered on any connection for the outage timeout.
    """

    def __init__(
        self,
        seconds: float,
        connections: Callable[[], list[tuple[Handler, socket.socket]]],
        on_outage: Callable[[Handler], None],
        on_silence: Callable[[int], None],
    ) -> None:
        super().__init__(name="ringfence outage watch", daemon=True)
        self._seconds = seconds
        self._connections = connections
        self._on_outage = on_outage
        self._on_silence = on_silence
        self._retries = _retries()
        self._has_pause = True  # whether this kernel has TCP_RTO_MAX_MS
        self._known: dict[socket.socket, _Options] = {}  # as set here
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(_LOOK_SECONDS):
            known: dict[socket.socket, _Options] = {}
            silent: dict[int, float] = {}  # by worker: one answer on any connection is an answer
            for handler, stream in self._connections():
                with contextlib.suppress(OSError):  # it was closed meanwhile
                    state = TcpState.of(stream)
                    if state.state == _ESTABLISHED:
                        known[stream] = self._look(handler, stream, state)
                        silent[handler.worker] = min(state.silent, silent.get(handler.worker, state.silent))
            self._known = known
            for worker in [worker for worker, seconds in silent.items() if seconds >= self._seconds]:
                self._on_silence(worker)

    def stop(self) -> None:
        self._stopped.set()

    def _look(self, handler: Handler, stream: socket.socket, state: TcpState) -> _Options:
        if state.probes and not state.in_flight and not state.unsent:
            self._on_outage(handler)
        quick = state.probes < self._retries // _QUICK_PROBES
        options = _Options(
            user_timeout=round(2000 * self._seconds),  # if this thread does not end it
            retransmit=_PAUSE_MS,
            keepalive=_QUICK_KEEPALIVE if quick else keepalive_seconds(self._seconds),
        )
        if state.probing:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # sends at once if there is a route again
            options = options._replace(user_timeout=_ENDLESS_MS, retransmit=self._probe_pause(state))
        if options != self._known.get(stream):
            self._set(stream, options)
        return options

    def _probe_pause(self, state: TcpState) -> int:
        """Milliseconds, such that `tcp_retries2` probes last for the outage timeout; short at the beginning."""
        if state.probes < self._retries // _QUICK_PROBES:
            return _PAUSE_MS
        left = max(0.0, self._seconds - state.silent) / max(1, self._retries - state.probes - 1)
        return min(max(_PAUSE_MS, round(left * 1000)), 120_000)

    def _set(self, stream: socket.socket, options: _Options) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, options.user_timeout)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, options.keepalive)
        if self._has_pause:
            try:
                stream.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, options.retransmit)
            except OSError as error:
                if error.errno != errno.ENOPROTOOPT:
                    raise
                self._has_pause = False


def _retries() -> int:
    """The kernel's limit on unanswered probes; what it is by default where /proc is hidden."""
    try:
        return int(Path("/proc/sys/net/ipv4/tcp_retries2").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 15
