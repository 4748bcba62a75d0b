"""Abort messages: how a failure is reported to the other workers over the control edges, and reported there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ringfence.admission.renewal import Challenge, Renewal
from ringfence.dataplane.request import Request
from ringfence.errors import (
    AbortedError,
    AdmissionError,
    AuthenticationError,
    CollectiveTimeoutError,
    MismatchError,
    PeerLostError,
    ProtocolError,
    RingfenceError,
)
from ringfence.runtime.control import Abort, Bye, ControlMessage

ABORT_CODES: tuple[type[RingfenceError], ...] = (
    RingfenceError,
    AuthenticationError,
    MismatchError,
    PeerLostError,
    CollectiveTimeoutError,
    AbortedError,
    ProtocolError,
    AdmissionError,
)


class Edge(Protocol):
    """A control connection to a neighbour in the admission tree."""

    @property
    def peer(self) -> int: ...
    @property
    def exporter(self) -> bytes: ...
    def send(self, message: Abort | Bye | Challenge | Renewal) -> None: ...
    def receive(self) -> list[ControlMessage]: ...


def flood(edges: Iterable[Edge], message: Abort | Bye, heard_from: Edge | None = None) -> None:
    """Send a message on every control edge but the one that it arrived on."""
    for edge in edges:
        if edge is not heard_from:
            edge.send(message)


def abort_message(rank: int, error: RingfenceError, suspect: int, pending: Request | None) -> Abort:
    """Return the message that reports an error of this worker. `pending` is its oldest request."""
    return Abort(
        reporter=rank,
        suspect=suspect,
        code=ABORT_CODES.index(type(error)) if type(error) in ABORT_CODES else 0,
        pending=pending.describe() if pending else "",
        text=str(error),
    )


def abort_text(message: Abort, rank: int, pending: Request | None) -> str:
    """Return the error message of this worker for an abort that another worker reported."""
    mine = f"; worker {rank} was in {pending.describe()}" if pending else ""
    theirs = f"; worker {message.reporter} was in {message.pending}" if message.pending else ""
    kind = ABORT_CODES[message.code].__name__ if message.code < len(ABORT_CODES) else f"code {message.code}"
    return f"worker {message.reporter} reported {kind}: {message.text}{theirs}{mine}"
