"""The sessions of a run, from the logs of all workers: what is missing, and where two ends disagree (spec/record.md, 14)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ringfence.admission.entry import Listing
from ringfence.record import agreement, heads
from ringfence.record.folder import REFUSED, LogState
from ringfence.record.log import Log, LogEntry
from ringfence.record.log_file import Blobs


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

    @property
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


def gaps(states: Sequence[LogState], sessions: Sequence[Session], blobs: Blobs) -> list[str]:
    """Return what keeps a record from being complete: an empty list if it is.

    A worker that was killed leaves a log without an end. That is no gap if another worker recorded the loss. That the last
    session of all was left out, no log shows: a checkpoint that it wrote does.
    """
    found = [f"{each.name} is refused: {each.reason}" for each in states if each.state == REFUSED]
    runs = {session.run_id for session in sessions}
    if len(runs) > 1:
        found.append(f"the logs are of {len(runs)} runs: {', '.join(sorted(runs))}")
    known = _Heads(sessions)
    for session in sessions:
        lost = session.lost
        for rank in range(len(session.listings)):
            own = session.logs.get(rank)
            if own is None:
                found.append(f"{session.place(rank)}: its log is missing")
                continue
            if not own.is_complete and rank not in lost:
                found.append(f"{session.place(rank)}: its log has no end, and no other worker recorded its loss")
            found += known.missing(session, rank, blobs)
    if sessions and (unfinished := [rank for rank, own in sessions[-1].logs.items() if _how(own) != "left"]):
        found.append(
            f"{sessions[-1].place(unfinished[0])}: the last session did not end well, so another may have followed"
        )
    return list(dict.fromkeys(found))


def _how(own: Log) -> str:
    return str(own.entries[-1].fields["how"]) if own.is_complete else ""


class _Heads:
    """The signatures of all logs, to look for the heads that later logs name."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self._known: set[tuple[str, int, str]] = set()
        self._followed: dict[tuple[int, str], Session] = {}
        for session in sessions:
            for rank, own in session.logs.items():
                self._known.update((session.run_id, rank, head.hex()) for head in own.heads)

    def missing(self, session: Session, rank: int, blobs: Blobs) -> Iterator[str]:
        """Return the heads that one log names and no log has, and those that two logs follow."""
        own = session.logs[rank]
        before: str = own.begin.fields["before"]
        named = [(rank, before)]
        named += [(entry.fields["rank"], entry.fields["before"]) for entry in of_kind(own, "rejoined")]
        for entry in of_kind(own, "heads"):
            if entry.fields["list"]:
                content, roster = blobs.get(entry.fields["list"]), bytes.fromhex(session.roster)
                stated = heads.decode(content, roster, session.listings)
                named += [(each, stated[each]["head"]) for each in stated]
        for each, head in named:
            if head and (session.run_id, each, head) not in self._known:
                missing = f"a log of rank {each} that is missing or was cut: its head is {head[:16]}"
                yield f"session {session.name} began after {missing}"
        if before and (first := self._followed.setdefault((rank, before), session)) is not session:
            yield f"{session.place(rank)}: session {first.name} follows the same log: the run was forked"


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
