"""Random changes of the record of a whole run: of lines, of logs, of the files that they name, and by workers that lie."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.unit import run_samples
from tests.unit.evidence_samples import Run
from tests.unit.log_samples import signed_again

Files = dict[str, bytes]  # by the name below the folder
Change = Mapping[str, bytes | None]  # new contents of files; None: it is removed
MARK = b'"kind":"signature"'
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


def contents(path: Path) -> Files:
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


@dataclass
class Sample:
    """The record of a run, and that of another one with other keys."""

    path: Path  # the record itself, which is changed and restored
    scratch: Path  # only the logs that a change touches, beside the same blobs
    files: Files
    other: Files
    runs: tuple[Run, Run]

    @classmethod
    def write(cls, path: Path) -> Sample:
        runs = run_samples.sessions()
        others = (replace(runs[0], name="third", run_id="run-8"), replace(runs[0], name="fourth", run_id="run-8"))
        run_samples.write(path / "record", runs)
        run_samples.write(path / "other", others)
        (path / "scratch").mkdir()
        (path / "scratch" / "blobs").symlink_to(path / "record" / "blobs")
        return cls(path / "record", path / "scratch", contents(path / "record"), contents(path / "other"), runs)

    @property
    def logs(self) -> list[str]:
        return sorted(name for name in self.files if name.endswith(".jsonl"))

    @property
    def blobs(self) -> list[str]:
        return sorted(name for name in self.files if name.startswith("blobs/"))

    def lines(self, name: str) -> list[bytes]:
        return self.files[name].splitlines(keepends=True)


# -- changes of lines --------------------------------------------------------------------------------------------------


def pick_line(sample: Sample, chance: random.Random) -> tuple[str, list[bytes], int]:
    name = chance.choice(sample.logs)
    lines = sample.lines(name)
    return name, lines, chance.randrange(len(lines))


def flip_in_log(sample: Sample, chance: random.Random) -> Change:
    return flip(sample, chance, chance.choice(sample.logs))


def flip_in_blob(sample: Sample, chance: random.Random) -> Change:
    return flip(sample, chance, chance.choice(sample.blobs))


def flip(sample: Sample, chance: random.Random, name: str) -> Change:
    content = bytearray(sample.files[name])
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return {name: bytes(content)}


def drop_line(sample: Sample, chance: random.Random) -> Change:
    name, lines, at = pick_line(sample, chance)
    return {name: b"".join(lines[:at] + lines[at + 1 :])}


def double_line(sample: Sample, chance: random.Random) -> Change:
    name, lines, at = pick_line(sample, chance)
    return {name: b"".join([*lines[: at + 1], *lines[at:]])}


def move_line(sample: Sample, chance: random.Random) -> Change:
    name, lines, at = pick_line(sample, chance)
    line = lines.pop(at)
    lines.insert(chance.randrange(len(lines) + 1), line)
    return {name: b"".join(lines)}


def swap_neighbours(sample: Sample, chance: random.Random) -> Change:
    name, lines, at = pick_line(sample, chance)
    at = min(at, len(lines) - 2)
    lines[at : at + 2] = reversed(lines[at : at + 2])
    return {name: b"".join(lines)}


def swap_between_logs(sample: Sample, chance: random.Random) -> Change:
    (name, lines, at), (other, others, there) = pick_line(sample, chance), pick_line(sample, chance)
    if name == other:
        return {}
    lines[at], others[there] = others[there], lines[at]
    return {name: b"".join(lines), other: b"".join(others)}


def truncate_line(sample: Sample, chance: random.Random) -> Change:
    """Cut off the end of a line, with its newline or without."""
    name, lines, at = pick_line(sample, chance)
    lines[at] = lines[at][: chance.randrange(len(lines[at]))] + chance.choice((b"", b"\n"))
    return {name: b"".join(lines)}


def take_line_of_another(sample: Sample, chance: random.Random) -> Change:
    """Take a line from the same place, or one of the same kind, in another worker's or session's log."""
    name, lines, at = pick_line(sample, chance)
    kind = json.loads(lines[at])["kind"]
    others = [line for other in sample.logs if other != name for line in sample.lines(other)]
    lines[at] = chance.choice([line for line in others if json.loads(line)["kind"] == kind])
    return {name: b"".join(lines)}


def insert_line_of_another(sample: Sample, chance: random.Random) -> Change:
    name, lines, at = pick_line(sample, chance)
    _, others, there = pick_line(sample, chance)
    lines.insert(at, others[there])
    return {name: b"".join(lines)}


def continue_with_another(sample: Sample, chance: random.Random) -> Change:
    """Take the rest of a log from another one."""
    name, lines, at = pick_line(sample, chance)
    _, others, there = pick_line(sample, chance)
    return {name: b"".join(lines[:at] + others[there:])}


# -- changes of logs ---------------------------------------------------------------------------------------------------


def cut_at_signature(sample: Sample, chance: random.Random) -> Change:
    name = chance.choice(sample.logs)
    lines = sample.lines(name)
    ends = [at for at, line in enumerate(lines, 1) if MARK in line]
    return {name: b"".join(lines[: chance.choice(ends[:-1])])}


def truncate_log(sample: Sample, chance: random.Random) -> Change:
    name = chance.choice(sample.logs)
    return {name: sample.files[name][: chance.randrange(len(sample.files[name]))]}


def append_tail(sample: Sample, chance: random.Random) -> Change:
    """Add what a killed process would leave, without a signature."""
    name, lines, _ = pick_line(sample, chance)
    _, others, at = pick_line(sample, chance)
    line = others[at] if MARK not in others[at] else b"{}\n"
    return {name: b"".join([*lines, line[: chance.randrange(1, len(line) + 1)]])}


def remove_log(sample: Sample, chance: random.Random) -> Change:
    return {chance.choice(sample.logs): None}


def rename_log(sample: Sample, chance: random.Random) -> Change:
    """Give a log the name of another rank or session, of none, or one that no log has."""
    name = chance.choice(sample.logs)
    session, rank = name.removesuffix(".jsonl").split("-")
    others = (f"{session}-{int(rank) + 3}.jsonl", f"{'0' * 16}-{rank}.jsonl", f"{session}-0{rank}.jsonl", "log.jsonl")
    return {name: None, chance.choice(others): sample.files[name]}


def replace_log(sample: Sample, chance: random.Random) -> Change:
    name, other = chance.sample(sample.logs, 2)
    return {name: sample.files[other]}


def swap_logs(sample: Sample, chance: random.Random) -> Change:
    name, other = chance.sample(sample.logs, 2)
    return {name: sample.files[other], other: sample.files[name]}


def leave_session_out(sample: Sample, chance: random.Random) -> Change:
    session = chance.choice(sample.logs)[:16]
    return {name: None for name in sample.logs if name.startswith(session)}


def sign_as_stranger(sample: Sample, chance: random.Random) -> Change:
    """Sign a log again with a key that no worker certified, and let the first line name that key or the genuine one."""
    name, is_named = chance.choice(sample.logs), chance.random() < 0.5

    def edit(documents: list[dict[str, Any]]) -> None:
        if is_named:
            documents[0]["key"] = OTHER_KEY.public_key().public_bytes_raw().hex()
        chosen = chance.choice([each for each in documents if each["kind"] not in ("begin", "signature")])
        chosen["at"] += chance.randrange(2)

    return {name: signed_again(sample.files[name], OTHER_KEY, edit)}


# -- changes of files and of the run -----------------------------------------------------------------------------------


def remove_blob(sample: Sample, chance: random.Random) -> Change:
    return {chance.choice(sample.blobs): None}


def swap_blobs(sample: Sample, chance: random.Random) -> Change:
    one, two = chance.sample(sample.blobs, 2)
    return {one: sample.files[two], two: sample.files[one]}


def take_blob_of_another_run(sample: Sample, chance: random.Random) -> Change:
    others = sorted(name for name in sample.other if name.startswith("blobs/"))
    return {chance.choice(sample.blobs): sample.other[chance.choice(others)]}


def mix_runs(sample: Sample, chance: random.Random) -> Change:
    """Add a log of another run, or put a session of it in the place of one, with all files that they name."""
    logs = sorted(name for name in sample.other if name.endswith(".jsonl"))
    added, removed = [chance.choice(logs)], dict[str, None]()
    if chance.random() < 0.5:
        added = [name for name in logs if name[:16] == added[0][:16]]
        removed = dict.fromkeys(sorted(leave_session_out(sample, chance)))
    found = {name: content for name, content in sample.other.items() if name in added or name.startswith("blobs/")}
    return {**found, **removed}


def take_log_of_another_run(sample: Sample, chance: random.Random) -> Change:
    """Put a log of another run in the place of one, with all files that it names."""
    logs = sorted(name for name in sample.other if name.endswith(".jsonl"))
    found = {name: content for name, content in sample.other.items() if name.startswith("blobs/")}
    return found | {chance.choice(sample.logs): sample.other[chance.choice(logs)]}


# -- workers that lie --------------------------------------------------------------------------------------------------


def odd_value(value: Any, chance: random.Random) -> Any:
    """Return another value, of the same type or not."""
    if isinstance(value, list) and value and chance.random() < 0.7:
        at = chance.randrange(len(value))
        return [*value[:at], odd_value(value[at], chance), *value[at + 1 :]]
    if isinstance(value, dict) and value and chance.random() < 0.7:
        name = chance.choice(sorted(value))
        return value | {name: odd_value(value[name], chance)}
    texts = ["", "x", "ab" * 32, "AB" * 32, "ab" * 31, run_samples.SCRIPT, "left", "failed", "written", "read"]
    numbers = [0, 1, 2, 3, -1, -2, 256, (1 << 63) - 1, 1 << 63]
    if chance.random() < 0.7:
        return chance.choice(
            texts if isinstance(value, str) else numbers if isinstance(value, int) else [[], {}, value]
        )
    return chance.choice([*texts, *numbers, [], {}, [[]], [value], value])


def lie(sample: Sample, chance: random.Random, edit: Callable[[list[dict[str, Any]]], None]) -> Change:
    name = chance.choice(sample.logs)
    first = json.loads(sample.lines(name)[0])
    for run in sample.runs:
        key = run.session.record_key(first["rank"])
        if key.public_key().public_bytes_raw().hex() == first["key"]:
            return {name: signed_again(sample.files[name], key, edit)}
    raise AssertionError("no key is that of the log")


def entries(documents: list[dict[str, Any]]) -> list[int]:
    return [at for at, each in enumerate(documents) if each["kind"] not in ("begin", "signature")]


def record_another_value(sample: Sample, chance: random.Random) -> Change:
    def edit(documents: list[dict[str, Any]]) -> None:
        document = documents[chance.choice([0, *entries(documents)])]
        name = chance.choice(sorted(document.keys() - {"number", "previous"}))
        document[name] = odd_value(document[name], chance)

    return lie(sample, chance, edit)


def record_without_an_entry(sample: Sample, chance: random.Random) -> Change:
    return lie(sample, chance, lambda documents: documents.__delitem__(chance.choice(entries(documents))))


def record_entries_in_another_order(sample: Sample, chance: random.Random) -> Change:
    def edit(documents: list[dict[str, Any]]) -> None:
        document = documents.pop(chance.choice(entries(documents)))
        documents.insert(chance.randrange(1, len(documents)), document)

    return lie(sample, chance, edit)


def record_an_entry_of_another(sample: Sample, chance: random.Random) -> Change:
    """Add an entry, or one with another value, that another worker or this one recorded."""

    def edit(documents: list[dict[str, Any]]) -> None:
        others = [json.loads(line) for line in sample.lines(chance.choice(sample.logs))]
        added = dict(others[chance.choice(entries(others))])
        if chance.random() < 0.5:
            name = chance.choice(sorted(added.keys() - {"number", "previous", "kind"}))
            added[name] = odd_value(added[name], chance)
        documents.insert(chance.randrange(1, len(documents)), added)

    return lie(sample, chance, edit)


Kinds = dict[str, Callable[[Sample, random.Random], Change]]


def by_name(*changes: Callable[[Sample, random.Random], Change]) -> Kinds:
    return {change.__name__: change for change in changes}


LINE_CHANGES: Kinds = by_name(
    *(flip_in_log, drop_line, double_line, move_line, swap_neighbours, swap_between_logs),
    *(truncate_line, take_line_of_another, insert_line_of_another, continue_with_another, sign_as_stranger),
)
CHANGES: Kinds = LINE_CHANGES | by_name(
    *(flip_in_blob, remove_blob, swap_blobs, take_blob_of_another_run),
    *(cut_at_signature, truncate_log, append_tail, remove_log, rename_log, replace_log, swap_logs, leave_session_out),
    *(mix_runs, take_log_of_another_run),
)
LIES: Kinds = by_name(
    *(record_another_value, record_without_an_entry),
    *(record_entries_in_another_order, record_an_entry_of_another),
)
