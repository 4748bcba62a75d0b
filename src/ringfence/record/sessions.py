"""The sessions of a run, from the logs of all workers: what is missing, and where two ends disagree (spec/record.md, 14)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from ringfence.admission.entry import Listing
from ringfence.record import agreement, heads
from ringfence.record.folder import REFUSED, LogState
from ringfence.record.log import Log, LogEntry
from ringfence.record.log_file import Blobs

_NO_END: Final = "its log has no end, and no other worker recorded its loss"
_NOT_NAMED: Final = (
    "this worker was lost, and no later log took up its log: whether that was cut at its last signature, nothing shows"
)


@dataclass(frozen=True)
class Session:
    """The logs of one session that were found and are genuine, by rank. All have the same roster."""

    listings: tuple[Listing, ...]
    logs: dict[int, Log]

    @property
    def roster(self) -> str:
        found: str = next(iter(self.logs.values())).begin.fields["roster"]
        return found

    @property
    def name(self) -> str:
        """The beginning of its roster's digest, as in the names of its logs: for messages, since two can be made alike."""
        return self.roster[:16]

    @property
    def run_id(self) -> str:
        return self.listings[0].entry.run_id

    @property
    def began(self) -> int:
        return min(each.begin.at for each in self.logs.values())

    @cached_property
    def lost(self) -> set[int]:
        """The workers whose loss another worker recorded."""
        return {
            entry.fields["worker"]
            for rank, each in self.logs.items()
            for entry in of_kind(each, "lost")
            if entry.fields["worker"] != rank
        }

    def place(self, rank: int) -> str:
        return f"session {self.name}, rank {rank}"


def of_kind(found: Log, kind: str) -> Iterator[LogEntry]:
    """Return the entries of a kind, in order."""
    return (entry for entry in found.entries if entry.kind == kind)


def sessions_of(states: Sequence[LogState]) -> list[Session]:
    """Return the sessions of which there is a genuine log, in the order of their beginnings."""
    found: dict[str, Session] = {}
    for each in states:
        if each.log is not None:
            said = each.log.begin.fields
            session = found.setdefault(said["roster"], Session(each.listings, {}))
            session.logs[said["rank"]] = each.log
    return sorted(found.values(), key=lambda session: session.began)


def gaps(states: Sequence[LogState], sessions: Sequence[Session], known: Heads) -> list[str]:
    """Return what keeps a record from being complete: an empty list if it is.

    A worker that was killed leaves a log without an end. That is no gap if another worker recorded the loss; whether it was
    cut, `open_end` says. That the last session of all was left out, no log shows: a checkpoint that it wrote does.
    """
    found = [f"{each.name} is refused: {each.reason}" for each in states if each.state == REFUSED]
    runs = {session.run_id for session in sessions}
    if len(runs) > 1:
        found.append(f"the logs are of {len(runs)} runs: {', '.join(sorted(runs))}")
    for session in sessions:
        for rank in range(len(session.listings)):
            own = session.logs.get(rank)
            if own is None:
                found.append(f"{session.place(rank)}: its log is missing")
                continue
            if not own.is_complete and rank not in session.lost:
                found.append(f"{session.place(rank)}: {_NO_END}")
            found += known.missing(session, rank)
            found += known.forks(session, rank)
    if sessions and (unfinished := [rank for rank, own in sessions[-1].logs.items() if _how(own) != "left"]):
        found.append(
            f"{sessions[-1].place(unfinished[0])}: the last session did not end well, so another may have followed"
        )
    return list(dict.fromkeys(found))


def _how(own: Log) -> str:
    return str(own.entries[-1].fields["how"]) if own.is_complete else ""


class Heads:
    """The signatures of all logs, and the heads of previous logs that they name."""

    def __init__(self, sessions: Sequence[Session], blobs: Blobs) -> None:
        self._known: set[tuple[str, int, str]] = set()
        self._by: dict[tuple[str, int, str], set[str]] = {}  # the rosters of the sessions that name a head
        self._named: dict[tuple[str, int], list[tuple[int, str]]] = {}  # by the roster and rank of the log that does
        self._followed: dict[tuple[int, str], Session] = {}
        self._lists: dict[tuple[str, str], list[tuple[int, str]]] = {}  # all workers of a session name the same file
        for session in sessions:
            for rank, own in session.logs.items():
                self._known.update((session.run_id, rank, head.hex()) for head in own.heads)
                named = [each for each in self._named_by(session, rank, blobs) if each[1]]
                self._named[session.roster, rank] = named
                for each, head in named:
                    self._by.setdefault((session.run_id, each, head), set()).add(session.roster)

    def _named_by(self, session: Session, rank: int, blobs: Blobs) -> Iterator[tuple[int, str]]:
        """Return the heads that one log names, with the ranks of their logs."""
        own = session.logs[rank]
        yield rank, own.begin.fields["before"]
        yield from ((entry.fields["rank"], entry.fields["before"]) for entry in of_kind(own, "rejoined"))
        for name in (entry.fields["list"] for entry in of_kind(own, "heads")):
            if name and (session.roster, name) not in self._lists:
                stated = heads.decode(blobs.get(name), bytes.fromhex(session.roster), session.listings)
                self._lists[session.roster, name] = [(each, stated[each]["head"]) for each in stated]
            yield from self._lists.get((session.roster, name), ())

    def missing(self, session: Session, rank: int) -> Iterator[str]:
        """Return the heads that one log names and no log has."""
        for each, head in self._named[session.roster, rank]:
            if (session.run_id, each, head) not in self._known:
                missing = f"a log of rank {each} that is missing or was cut: its head is {head[:16]}"
                yield f"session {session.name} began after {missing}"

    def forks(self, session: Session, rank: int) -> Iterator[str]:
        """Return that an earlier session follows the same log as one log does. Call it for each log once."""
        before: str = session.logs[rank].begin.fields["before"]
        if before and (first := self._followed.setdefault((rank, before), session)) is not session:
            yield f"{session.place(rank)}: session {first.name} follows the same log: the run was forked"

    def is_named(self, session: Session, rank: int) -> bool:
        """Whether a log of another session names the last signature of this one: then it was not cut since."""
        by = self._by.get((session.run_id, rank, session.logs[rank].head.hex()), set())
        return bool(by - {session.roster})


def open_end(session: Session, rank: int, known: Heads) -> str:
    """Return why a log may have been cut, or an empty text if what it has is all that its worker signed.

    The log of a worker that was killed ends anywhere: only a log that names its last signature tells a kill from a cut.
    """
    if session.logs[rank].is_complete:
        return ""
    if rank not in session.lost:
        return _NO_END
    return "" if known.is_named(session, rank) else _NOT_NAMED


def disagreements(sessions: Sequence[Session]) -> tuple[list[str], list[tuple[int, int, int]]]:
    """Return where two ends of a connection recorded different frames, and three counts of directions for each session.

    They are those that both ends recorded; of these, those of which one end has later points; and those of one end only.
    Raises RecordError if a log has points that contradict each other.
    """
    found: list[str] = []
    counts: list[tuple[int, int, int]] = []
    for session in sessions:
        points: dict[int, list[Any]] = {rank: [] for rank in range(len(session.listings))}
        for rank, own in session.logs.items():
            points[rank] += [point for entry in of_kind(own, "passed") for point in entry.fields["points"]]
        result = agreement.compare(points)
        counts.append(result[1:])
        for each in result.disagreements:
            ends = f"rank {each.sender} sent and rank {each.receiver} received other frames"
            found.append(f"session {session.name}: {ends}, within the first {each.frames:,} of channel {each.channel}")
    return found, counts
