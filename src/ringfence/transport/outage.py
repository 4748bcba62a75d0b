"""TCP through outages: a connection survives until its peer has not answered for the outage timeout, and resumes quickly.

TCP resumes by itself, except for three of its limits (measurements: docs/guides/outages.md):

- It gives up after a number of retransmissions. TCP_USER_TIMEOUT replaces that by a time.
- It retransmits ever more rarely, up to every 120 s. TCP_RTO_MAX_MS limits the pause, from Linux 6.15 on.
- Where nothing is in flight and the next segment cannot leave, because the peer does not read or this machine has no route, it
  sends probes instead, gives up after `tcp_retries2` of them, and counts a peer that answers but does not read as silent.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")

# Errors of the kernel when a peer does not answer or has no route.
UNANSWERED: Final = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})

_TCP_RTO_MAX_MS: Final = 44
_PAUSE_MS: Final = 1000  # between retransmissions, so that a run resumes quickly; the kernel's minimum
_ENDLESS_MS: Final = 1 << 30  # of TCP_USER_TIMEOUT: 12 days
CHECK_SECONDS: Final = 1.0
_ANNOUNCED_SECONDS: Final = 5.0  # without an answer, until an outage is logged
_NAMED: Final = 16  # peers in a message
_LATE_SECONDS: Final = 1.5  # without an answer to data that was sent
_QUICK_PROBES: Final = 2  # this fraction is sent quickly; the others are spread over the outage timeout
_QUICK_KEEPALIVE: Final = 1  # seconds between keepalives on an idle connection
_ESTABLISHED: Final = 1
_INFO: Final = struct.Struct("=B2xB20xI24xII84xI")  # of struct tcp_info, up to tcpi_notsent_bytes
_DIALS: Final = 2  # retransmitted SYNs before the kernel reports a timeout; then the worker dials again


class Handler(Protocol):
    """Receives the events of a connection."""

    served_always: bool  # also while no collective is in progress
    worker: int  # global rank of the peer; -1: none, or not known yet

    def notify(self, readable: bool, writable: bool, ended: bool = False) -> None: ...


class TcpState(NamedTuple):
    """The kernel's state of a connection."""

    state: int
    probes: int  # sent since the last answer
    in_flight: int  # segments
    silent: float  # seconds since anything came from the peer
    unsent: int  # bytes

    @classmethod
    def of(cls, stream: socket.socket) -> TcpState:
        raw = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        state, probes, in_flight, data, answer, unsent = _INFO.unpack(raw)
        # A connection that only receives data gets no acknowledgements, so data counts as an answer too.
        return cls(state, probes, in_flight, min(data, answer) / 1000, unsent)

    @property
    def probing(self) -> bool:
        """Whether TCP sends window probes instead of the data that it has to send."""
        return self.unsent > 0 and self.in_flight == 0

    @property
    def unanswered(self) -> bool:
        """Whether the peer owes an answer: to a probe, or for more than a moment to data."""
        return self.probes > 0 or (self.in_flight > 0 and self.silent > _LATE_SECONDS)


class _Options(NamedTuple):
    """The options set on a connection: milliseconds, milliseconds, seconds."""

    user_timeout: int
    retransmit: int
    keepalive: int


def is_unanswered(error: BaseException | None) -> bool:
    """Whether this error, or its cause, is an OSError that means that the peer did not answer."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error is not None and error.errno in UNANSWERED


def tolerate(stream: socket.socket, seconds: float) -> None:
    """Let the kernel close this connection when the peer has not answered for this many seconds, and not before."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1000))
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _idle_seconds(seconds))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, keepalive_seconds(seconds))


def _idle_seconds(outage: float) -> int:
    """Seconds without data until the first keepalive."""
    return max(1, min(3, round(outage / 3)))


def keepalive_seconds(outage: float) -> int:
    """Seconds between keepalives: about 10 per outage timeout, because they count towards `tcp_retries2` later on."""
    return max(1, round(outage / 10))


def dial_briefly(stream: socket.socket) -> None:
    """Let `connect` fail after some seconds without an answer: dialling again is faster than TCP's exponential backoff."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, _DIALS)


class OutageWatch(Generic[T]):
    """Checks connections and sets the options that let TCP survive an outage and resume quickly. Call `check` every second, or
    `start` a thread that does. An outage of some seconds is logged, and so is its end.

    Args:
        seconds: without an answer, after which a peer is lost.
        connections: returns every connection: a number that stands for the peer, what it belongs to, and its socket.
        on_outage: called for a connection without data in flight when the peer does not answer a keepalive, to send a message:
            otherwise a sender that missed a window update resumes only with its next, rare probe.
        on_unanswered: called with the peers that owe an answer on every connection, when they change.
        on_silence: called with a peer that has not answered on any connection for `seconds`.
        name_of: names a peer in messages; None: nothing is logged.
    """

    def __init__(
        self,
        seconds: float,
        connections: Callable[[], list[tuple[int, T, socket.socket]]],
        on_outage: Callable[[T], None],
        on_unanswered: Callable[[frozenset[int]], None],
        on_silence: Callable[[int], None],
        name_of: Callable[[int], str] | None,
    ) -> None:
        self._seconds = seconds
        self._connections = connections
        self._on_outage = on_outage
        self._on_unanswered = on_unanswered
        self._on_silence = on_silence
        self._unanswered: frozenset[int] = frozenset()
        self._announcements = None if name_of is None else _Announcements(seconds, name_of)
        self._retries = _retries()
        self._has_pause = True  # whether the kernel supports TCP_RTO_MAX_MS
        self._known: dict[socket.socket, _Options] = {}  # options set so far
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="ringfence outage watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def join(self, timeout: float) -> None:
        """Wait until the thread, if there is one, has ended."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopped.wait(CHECK_SECONDS):
            self.check()

    def check(self) -> None:
        """Look at every connection once."""
        known: dict[socket.socket, _Options] = {}
        silent: dict[int, float] = {}  # by peer: an answer on any connection counts
        unanswered: dict[int, bool] = {}
        for peer, owner, stream in self._connections():
            with contextlib.suppress(OSError):  # the connection was closed meanwhile
                state = TcpState.of(stream)
                if state.state == _ESTABLISHED:
                    known[stream] = self._check(owner, stream, state)
                    silent[peer] = min(state.silent, silent.get(peer, state.silent))
                    unanswered[peer] = state.unanswered and unanswered.get(peer, True)
        self._known = known
        found = frozenset(peer for peer, owes in unanswered.items() if owes)
        if found != self._unanswered:
            self._unanswered = found
            self._on_unanswered(found)
        if self._announcements is not None:
            self._announcements.update(silent, found)
        for peer in [peer for peer, seconds in silent.items() if seconds >= self._seconds]:
            self._on_silence(peer)

    def _check(self, owner: T, stream: socket.socket, state: TcpState) -> _Options:
        if state.probes and not state.in_flight and not state.unsent:
            self._on_outage(owner)
        quick = state.probes < self._retries // _QUICK_PROBES
        options = _Options(
            user_timeout=round(2000 * self._seconds),  # fallback if this thread does not close it
            retransmit=_PAUSE_MS,
            keepalive=_QUICK_KEEPALIVE if quick else keepalive_seconds(self._seconds),
        )
        if state.probing:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # sends at once when there is a route again
            options = options._replace(user_timeout=_ENDLESS_MS, retransmit=self._probe_pause(state))
        if options != self._known.get(stream):
            self._set(stream, options)
        return options

    def _probe_pause(self, state: TcpState) -> int:
        """Milliseconds between probes, so that `tcp_retries2` probes last for the outage timeout; short at first."""
        if state.probes < self._retries // _QUICK_PROBES:
            return _PAUSE_MS
        left = max(0.0, self._seconds - state.silent) / max(1, self._retries - state.probes - 1)
        return min(max(_PAUSE_MS, round(left * 1000)), 120_000)

    def _set(self, stream: socket.socket, options: _Options) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, options.user_timeout)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, options.keepalive)
        # Only this option makes the kernel start the timer anew. Otherwise a long pause of the last outage ends first, and the
        # next outage is announced late.
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _idle_seconds(self._seconds))
        if self._has_pause:
            try:
                stream.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, options.retransmit)
            except OSError as error:
                if error.errno != errno.ENOPROTOOPT:
                    raise
                self._has_pause = False


class _Announcements:
    """Logs that peers do not answer, and that they answer again."""

    def __init__(self, seconds: float, name_of: Callable[[int], str]) -> None:
        self._seconds = seconds
        self._name_of = name_of
        self._since: dict[int, float] = {}  # when a peer whose outage was announced answered last

    def update(self, silent: Mapping[int, float], unanswered: Set[int]) -> None:
        """`silent`: seconds since each peer answered. `unanswered`: those that owe an answer."""
        now = time.monotonic()
        new = sorted(peer for peer in unanswered - self._since.keys() if silent[peer] >= _ANNOUNCED_SECONDS)
        over = sorted(peer for peer in self._since if peer in silent and peer not in unanswered)
        if new:
            _log.warning(
                "no answer from %s for %.0f s: a machine or the network is down. Waiting for up to %g s "
                "(RINGFENCE_OUTAGE_TIMEOUT)",
                self._names(new),
                max(silent[peer] for peer in new),
                self._seconds,
            )
        if over:
            length = max(now - silent[peer] - self._since[peer] for peer in over)
            _log.warning("%s answered again after %.0f s", self._names(over), length)
        kept = {peer: since for peer, since in self._since.items() if peer in silent and peer not in over}
        self._since = kept | {peer: now - silent[peer] for peer in new}

    def _names(self, peers: list[int]) -> str:
        return ", ".join(map(self._name_of, peers[:_NAMED])) + (", ..." if len(peers) > _NAMED else "")


def _retries() -> int:
    """The kernel's limit on unanswered probes, or its default if /proc is not readable."""
    try:
        return int(Path("/proc/sys/net/ipv4/tcp_retries2").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 15
