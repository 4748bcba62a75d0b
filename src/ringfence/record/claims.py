"""What somebody claims of a run, and whether its record shows it (spec/record.md, 14).

A claim is *shown*, *refuted*, or *not shown*: the record has nothing that would decide it. Only the first is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

from ringfence.admission.policy_file import toml_table
from ringfence.errors import RecordError
from ringfence.record import folder
from ringfence.record.evidence import VERIFIED, Shown, verify_shown
from ringfence.record.folder import REFUSED, LogState
from ringfence.record.log import Log
from ringfence.record.log_file import Blobs
from ringfence.record.sessions import Heads, Session, disagreements, gaps, of_kind, open_end, sessions_of

SHOWN, NOT_SHOWN, REFUTED = "shown", "not shown", "refuted"
_REASONS: Final = 20  # of one verdict that are given
_SENT, _RECEIVED = 2, 3  # among the counts of a peer: bytes inside the machine


@dataclass(frozen=True)
class Claims:
    """What must hold of every worker in every session. An empty value claims nothing."""

    run: str = ""
    complete: bool = False
    sealed: bool = False
    scripts: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()
    started_from: tuple[str, ...] = ()
    attested: tuple[str, ...] = ()
    measurements: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Verdict(NamedTuple):
    """Whether a record shows a claim, and why or why not."""

    claim: str
    state: str
    reasons: tuple[str, ...]
    is_claimed: bool  # otherwise it is what every audit checks

    @property
    def is_met(self) -> bool:
        return self.state == SHOWN or (self.state == NOT_SHOWN and not self.is_claimed)


@dataclass(frozen=True)
class Record:
    """All that an audit verified: each log, the sessions that they make up, and what their workers presented."""

    states: Sequence[LogState]
    sessions: Sequence[Session]
    shown: Mapping[tuple[str, int], Sequence[Shown]]  # by roster and rank
    blobs: Blobs

    @classmethod
    def read(cls, path: Path) -> Record:
        """Verify the logs of a folder, each by itself, and what their workers presented. Raises RecordError or OSError."""
        states, blobs = folder.audit(path), Blobs(path)
        sessions = sessions_of(states)
        shown: dict[tuple[str, int], list[Shown]] = {}
        for session in sessions:
            begins = {rank: own.begin for rank, own in session.logs.items()}
            for rank, begin in begins.items():
                try:
                    shown[session.roster, rank] = verify_shown(begin, blobs, begins)
                except RecordError as error:  # of this worker only: the others' proofs are verified
                    shown[session.roster, rank] = [Shown("proof", REFUSED, str(error), {})]
        return cls(states, sessions, shown, blobs)

    @cached_property
    def heads(self) -> Heads:
        """The heads of previous logs that logs name."""
        return Heads(self.sessions, self.blobs)

    def logs(self) -> Iterator[tuple[Session, int, Log]]:
        """Return every genuine log, with its session and rank."""
        for session in self.sessions:
            for rank, own in sorted(session.logs.items()):
                yield session, rank, own


def read(text: bytes, where: str) -> Claims:
    """Read a file of claims. Raises PolicyError: a claim that is misspelt would be none."""
    table = toml_table.parse(text, toml_table.no_files, where)
    attested = table.table("attested", None)
    measured = None if attested is None else attested.table("measurements", None)
    found = Claims(
        run=table.text("run", ""),
        complete=table.flag("complete", False),
        sealed=table.flag("sealed", False),
        scripts=table.texts("scripts", ()),
        packages=table.texts("packages", ()),
        data=table.texts("data", ()),
        workers=table.texts("workers", ()),
        checkpoints=table.texts("checkpoints", ()),
        started_from=table.texts("started_from", ()),
        attested=() if attested is None else attested.texts("kinds"),
        measurements={} if measured is None else {name: measured.texts(name) for name in measured.names},
    )
    table.done()
    if found.started_from and not found.checkpoints:
        raise table.error("started_from says something of checkpoints: name those as well")
    return found


def evaluate(record: Record, claims: Claims) -> list[Verdict]:
    """Return a verdict for what an audit always checks, and for each claim."""
    always: list[tuple[bool, str, Callable[[], tuple[str, list[str]]]]] = [
        (False, "every log is genuine", lambda: _genuine(record)),
        (False, "what workers presented admits them", lambda: _admitted(record)),
        (False, "both ends of every connection agree on what passed", lambda: _agreed(record)),
    ]
    claimed = [
        (bool(claims.run), f"the run is {claims.run}", lambda: _run(record, claims)),
        (claims.complete, "complete: no worker's log and no session is missing", lambda: _complete(record)),
        (bool(claims.workers), "nobody else was admitted", lambda: _members(record, claims)),
        (bool(claims.attested), "all workers are attested", lambda: _attested(record, claims)),
        (bool(claims.scripts or claims.packages), "only this code ran", lambda: _code(record, claims)),
        (bool(claims.data), "only these data were used", lambda: _data(record, claims)),
        (claims.sealed, "nothing left a machine unsealed", lambda: _sealed(record)),
        (bool(claims.checkpoints), "these checkpoints descend from the run", lambda: _checkpoints(record, claims)),
    ]
    found = []
    for is_claimed, claim, check in (*always, *(each for each in claimed if each[0])):
        state, reasons = check()
        found.append(Verdict(claim, state, (*reasons[:_REASONS], *_more(len(reasons) - _REASONS)), is_claimed))
    return found


def _more(count: int) -> list[str]:
    return [f"and {count:,} more"] if count > 0 else []


def _refuted(problems: list[str], otherwise: str) -> tuple[str, list[str]]:
    return (REFUTED, problems) if problems else (SHOWN, [otherwise])


def _genuine(record: Record) -> tuple[str, list[str]]:
    refused = [f"{each.name}: {each.reason}" for each in record.states if each.state == REFUSED]
    sessions = f"{len(record.sessions)} session{'s' * (len(record.sessions) != 1)}"
    return _refuted(refused, f"{len(record.states)} logs of {sessions}")


def _admitted(record: Record) -> tuple[str, list[str]]:
    problems, kept = [], 0
    for session, rank, _ in record.logs():
        for each in record.shown[session.roster, rank]:
            kept += each.verdict == VERIFIED
            if each.verdict == REFUSED:
                problems.append(f"{session.place(rank)}: {each.kind}: {each.reason}")
    if not problems and not kept:
        return NOT_SHOWN, ["no worker presented anything that convinces others than the members"]
    return _refuted(problems, f"{kept} proofs were verified again, as of the time of the run")


def _agreed(record: Record) -> tuple[str, list[str]]:
    try:
        problems, counts = disagreements(record.sessions)
    except RecordError as error:
        return REFUTED, [str(error)]
    compared, partial, alone = (sum(each) for each in zip(*counts, strict=True)) if counts else (0, 0, 0)
    pairs = zip(record.sessions, counts, strict=True)
    without = [session.name for session, found in pairs if not found[0] and len(session.listings) > 1]
    if without and not problems:
        why = "no connection was recorded by both ends: inside a machine there are only counts"
        return NOT_SHOWN, [f"session {name}: {why}" for name in without]
    return _refuted(
        problems,
        f"{compared} directions of connections were recorded by both ends, of which {partial} go on at one end only, as "
        f"after a loss; {alone} were recorded by one end",
    )


def _run(record: Record, claims: Claims) -> tuple[str, list[str]]:
    def objection(session: Session, rank: int, own: Log) -> str:
        return "" if session.run_id == claims.run else f"its run is {session.run_id}"

    return _everyone(record, objection)


def _complete(record: Record) -> tuple[str, list[str]]:
    problems = gaps(record.states, record.sessions, record.heads)
    opened = [
        f"{session.place(rank)}: {why}"
        for session, rank, _ in record.logs()
        if (why := open_end(session, rank, record.heads))
    ]
    if opened and not problems:
        return NOT_SHOWN, opened
    return _refuted(
        problems,
        "every worker of every session left a log with its end, or its loss is in another's and a later log names the last "
        "signature; every log that a later one names is there; the last session ended well",
    )


class _Undecided(str):
    """Why the record of one worker does not show a claim, and does not refute it either."""


def _everyone(
    record: Record, objection: Callable[[Session, int, Log], str], of_work: bool = False
) -> tuple[str, list[str]]:
    """Return whether something holds of every worker of every session. `objection` returns what speaks against it.

    `of_work`: it is about what workers did after the first line, which a log that may have been cut does not show.
    """
    problems: list[str] = []
    undecided: list[str] = []
    for session in record.sessions:
        for rank in range(len(session.listings)):
            own = session.logs.get(rank)
            found = _Undecided("its log is missing") if own is None else objection(session, rank, own)
            if of_work and own is not None and (not found or isinstance(found, _Undecided)):
                found = _Undecided(open_end(session, rank, record.heads) or found)
            if found:
                (undecided if isinstance(found, _Undecided) else problems).append(f"{session.place(rank)}: {found}")
    undecided += [f"{each.name} is refused" for each in record.states if each.state == REFUSED]
    for session, rank, _ in record.logs():
        undecided += record.heads.missing(session, rank)
    if undecided and not problems:
        return NOT_SHOWN, list(dict.fromkeys(undecided))
    lost = sum(not own.is_complete for _, _, own in record.logs()) if of_work else 0
    until = f"; {lost} of them until shortly before the loss of their worker" if lost else ""
    return _refuted(problems, f"{sum(len(each.logs) for each in record.sessions)} workers' logs say so{until}")


def _members(record: Record, claims: Claims) -> tuple[str, list[str]]:
    def objection(session: Session, rank: int, own: Log) -> str:
        names = [each.facts["identity"] for each in record.shown[session.roster, rank] if "identity" in each.facts]
        if not names:
            return _Undecided("what it presented names nobody")
        return "" if set(names) <= set(claims.workers) else f"{', '.join(names)} was admitted"

    return _everyone(record, objection)


def _attested(record: Record, claims: Claims) -> tuple[str, list[str]]:
    def objection(session: Session, rank: int, own: Log) -> str:
        for each in record.shown[session.roster, rank]:
            if each.kind in claims.attested and each.verdict == VERIFIED:
                wrong = [
                    f"{each.kind}: {name} is {each.facts.get(name, 'not there')}"
                    for name, accepted in claims.measurements.items()
                    if each.facts.get(name) not in accepted
                ]
                return ", ".join(wrong)
        return _Undecided(f"it presented no evidence of kind {' or '.join(claims.attested)} that is verified")

    return _everyone(record, objection)


def _code(record: Record, claims: Claims) -> tuple[str, list[str]]:
    def objection(session: Session, rank: int, own: Log) -> str:
        said = [entry.fields for entry in of_kind(own, "code")]
        if not said:
            return _Undecided("its log has no entry of its code")
        for each in said:
            if claims.scripts and each["digest"] not in claims.scripts:
                return f"it ran the script {each['script']} with the digest {each['digest']}"
            if claims.packages and each["packages"] not in claims.packages:
                return f"its packages have the digest {each['packages']}"
        return ""

    return _everyone(record, objection, of_work=True)


def _data(record: Record, claims: Claims) -> tuple[str, list[str]]:
    def objection(session: Session, rank: int, own: Log) -> str:
        roots = [entry.fields["root"] for entry in of_kind(own, "data")]
        return ", ".join(f"it used data with the root {root}" for root in roots if root not in claims.data)

    state, reasons = _everyone(record, objection, of_work=True)
    if state != SHOWN:
        return state, reasons
    used = sum(1 for _, _, own in record.logs() for _ in of_kind(own, "data"))
    if not used:
        return NOT_SHOWN, ["no log names any data: `ringfence.record_data` records them"]
    return SHOWN, [f"{used} logs name these data, and no others; that nothing else was read, no log shows"]


def _sealed(record: Record) -> tuple[str, list[str]]:
    def objection(session: Session, rank: int, own: Log) -> str:
        host = session.listings[rank].entry.host
        for worker, counts in sorted(own.peers.items()):
            if worker not in range(len(session.listings)):
                return f"its log has counts of a worker {worker}, which is not in the roster"
            if session.listings[worker].entry.host != host and (counts[_SENT] or counts[_RECEIVED]):
                count = counts[_SENT] + counts[_RECEIVED]
                return f"it exchanged {count:,} bytes unsealed with rank {worker}, which is on another machine"
        elsewhere = [worker for worker, each in enumerate(session.listings) if each.entry.host != host]
        if elsewhere and own.is_complete and not own.has_final_counts:
            return _Undecided("its log has no counts of bytes at its end")
        if not own.is_complete:  # it lacks its last counts: those of the other ends are as good
            for worker in elsewhere:
                other = session.logs.get(worker)
                if other is None or not other.is_complete:
                    return _Undecided(f"neither it nor rank {worker}, on another machine, counted until the end")
        return ""

    return _everyone(record, objection, of_work=True)


def _checkpoints(record: Record, claims: Claims) -> tuple[str, list[str]]:
    problems: list[str] = []
    written = set(claims.started_from)
    for session in record.sessions:
        here: set[str] = set()
        for rank, own in sorted(session.logs.items()):
            by_it = set(written)
            for said in (entry.fields for entry in of_kind(own, "checkpoint")):
                if said["action"] == "written":
                    by_it.add(said["anchor"])
                elif said["anchor"] not in by_it:
                    problems.append(f"{session.place(rank)}: it read {said['anchor']}, which this run had not written")
            here |= by_it
        written |= here
    missing = set(claims.checkpoints) - (written - set(claims.started_from))
    problems += [f"no log says that {anchor} was written" for anchor in sorted(missing)]
    state, reasons = _everyone(record, lambda session, rank, own: "", of_work=True)
    if state != SHOWN and not problems:
        return state, reasons
    return _refuted(problems, "this run wrote them; all that it read it had written before, or started from")
