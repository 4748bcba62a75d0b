"""The requests in progress on a worker: their deadlines, the warnings about long waits, and how many have completed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ringfence.dataplane.request import POINT_TO_POINT, CollectiveRequest, Request, first_check
from ringfence.errors import ProtocolError, RingfenceError
from ringfence.runtime.communicator import Communicator
from ringfence.runtime.point_to_point import Transfer

_log = logging.getLogger("ringfence")

_NEVER = float("inf")


class Requests:
    """Requests that have been submitted and not completed, in the order of submission."""

    def __init__(self, rank: int, clock: Callable[[], float]) -> None:
        self.unfinished: dict[Request, Communicator] = {}
        self.completed = [0] * (POINT_TO_POINT + 1)  # successful requests by operation code
        self.next_check = _NEVER  # when `check` has something to do
        self.worker_names: Sequence[str] = ()  # identity and address of each worker, for messages
        self._rank = rank
        self._clock = clock

    def add(self, request: Request, communicator: Communicator) -> None:
        """Add a submitted request."""
        self.unfinished[request] = communicator
        if request.next_check < self.next_check:
            self.next_check = request.next_check

    def set_deadline(self, request: Request, deadline: float, timeout: float) -> None:
        """Give a deadline to a request that was submitted without one: a caller waits for it now."""
        request.deadline, request.timeout = deadline, timeout
        request.next_check = deadline - timeout + first_check(timeout)
        self.next_check = min(self.next_check, request.next_check)

    def complete(self, request: Request) -> Communicator | None:
        """Complete a request successfully; return its communicator, or None if the request had ended before.

        The request is completed before it is removed, so that an interrupt in between does not lose it.
        """
        communicator = self.unfinished.get(request)
        if communicator is not None:
            request.finish()
            self.unfinished.pop(request, None)
            self.completed[request.call.operation] += 1
        return communicator

    def fail_all(self, error: RingfenceError) -> None:
        """Complete every request with an error. A second call completes an interrupted first one."""
        while self.unfinished:
            request = next(iter(self.unfinished))
            request.finish(error)
            self.unfinished.pop(request, None)

    def fail_removed(self, communicator: Communicator) -> None:
        """Complete the requests of a removed communicator with an error."""
        for request in [each for each, owner in self.unfinished.items() if owner is communicator]:
            request.finish(ProtocolError(f"{request.describe()} was pending when its group was destroyed"))
            self.unfinished.pop(request, None)

    def collectives(self, communicator: Communicator | None = None) -> list[Request]:
        """Return the collectives in progress, of one communicator or of all."""
        return [
            request
            for request, owner in self.unfinished.items()
            if isinstance(request, CollectiveRequest) and (communicator is None or owner is communicator)
        ]

    def in_progress(self) -> bool:
        """Return whether a collective was submitted, or a part of a transfer was sent or received, and has not ended."""
        transfers = (each for each in self.unfinished if isinstance(each, Transfer))
        return bool(self.collectives()) or any(each.position for each in transfers)

    def oldest(self) -> Request | None:
        """Return the request that was submitted first."""
        return next(iter(self.unfinished), None)

    def oldest_wait(self) -> float:
        """Return for how many seconds the oldest request with a deadline has waited. Any thread may call it."""
        started = [each.deadline - each.timeout for each in tuple(self.unfinished) if each.timeout < _NEVER]
        return max(0.0, self._clock() - min(started, default=_NEVER))

    def overdue(self, now: float) -> Request | None:
        """Return a request whose deadline has passed."""
        return next((request for request in self.unfinished if request.deadline <= now), None)

    def warn(self, now: float) -> None:
        """Warn of long waits: of the first request of each communicator, and again when it has waited twice as long."""
        reported = set()
        for request, communicator in self.unfinished.items():
            if request.next_check <= now:
                waited = now - request.deadline + request.timeout
                request.next_check = min(request.deadline, now + waited)
                if communicator not in reported:
                    reported.add(communicator)
                    _log.warning("worker %d: %s", self._rank, self._waiting_text(request, communicator, waited))
        self.next_check = min((request.next_check for request in self.unfinished), default=_NEVER)

    def _waiting_text(self, request: Request, communicator: Communicator, waited: float) -> str:
        name, _, details = request.describe().partition(" (")
        late = sorted({link.worker for link in communicator.waiting_for()})
        return (
            f"{name} has waited {waited:.0f} s for {', '.join(map(self.name_of, late)) or 'earlier calls'} in group "
            f"{communicator.name!r} ({details}; it fails after {request.timeout:.0f} s"
        )

    def name_of(self, worker: int) -> str:
        return f"worker {worker} ({self.worker_names[worker]})" if self.worker_names else f"worker {worker}"
