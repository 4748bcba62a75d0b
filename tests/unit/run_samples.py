"""The record of a whole run: two sessions of three workers on two machines. One is killed, and another takes its place."""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ringfence.record import heads
from ringfence.record.json_object import Json
from ringfence.record.log_file import Blobs, LogFile, log_name, open_folder
from tests.unit.evidence_samples import NOW, Run, Site, secret_run

HOSTS = ("10.0.0.7", "10.0.0.7", "10.0.0.8")
MODEL, LATER = "ab" * 32, "cd" * 32  # anchors of checkpoints
SCRIPT, ROOT = "12" * 32, "34" * 32
ARGUMENTS, PACKAGES = b'["--lr","0.1"]', b'{"torch 2.13.0":""}'
KILLED = 2
CLAIMS = f"""\
run = "run-7"
complete = true
sealed = true
workers = ["spiffe://example.org/worker/0", "spiffe://example.org/worker/1", "spiffe://example.org/worker/2"]
scripts = "{SCRIPT}"
packages = "{hashlib.sha256(PACKAGES).hexdigest()}"
data = "{ROOT}"
checkpoints = ["{MODEL}", "{LATER}"]
"""

Entries = list[tuple[str, Json]]


SITE = Site(datetime.datetime.fromtimestamp(NOW, datetime.UTC))


@cache
def sessions() -> tuple[Run, Run]:
    """Both sessions, by certificates that are valid now. Signing takes time, so they are made once."""
    first = replace(SITE.run(), hosts=HOSTS)
    return first, replace(first, name="second")


def sessions_by_secret() -> tuple[Run, Run]:
    first = replace(secret_run(), hosts=HOSTS)
    return first, replace(first, name="second")


def points(run: Run, rank: int, frames: int = 6) -> list[list[Any]]:
    """What a worker says passed: the same of each direction as the other end says."""
    found = []
    for worker in range(run.size):
        for direction in (0, 1):
            if worker == rank:
                continue
            ends = (worker, rank) if direction else (rank, worker)
            connection = hashlib.sha256(f"{run.name} {sorted(ends)}".encode()).hexdigest()
            for count in (1, 2, 4, frames):
                digest = hashlib.sha256(f"{run.name} {ends} {count}".encode()).hexdigest()
                found.append([worker, connection, 0, direction, count, digest])
    return found


def peers(run: Run, rank: int) -> list[list[int]]:
    """Bytes are sealed between machines, and shared inside one."""
    found = []
    for worker in range(run.size):
        if worker != rank:
            shared = HOSTS[worker] == HOSTS[rank]
            found.append([worker, *([0, 0] if shared else [7, 9]), *([7, 9] if shared else [0, 0]), 70, 90])
    return found


def lines(run: Run, rank: int, blobs: Blobs, first: bool) -> Entries:
    """What a worker records after its first line."""
    code = {"script": "train.py", "digest": SCRIPT, "arguments": blobs.put(ARGUMENTS), "packages": blobs.put(PACKAGES)}
    found: Entries = [("code", code), ("data", {"root": ROOT, "files": 3, "bytes": 4096})]
    counts = ("peers", {"peers": peers(run, rank)})
    if first:
        found.append(("checkpoint", {"action": "written", "anchor": MODEL}))
        if rank == KILLED:
            return [*found, counts]
        lost = {"worker": KILLED, "text": f"worker {KILLED} was lost"}
        found += [("lost", lost), counts, ("passed", {"points": points(run, rank)})]
        return [*found, ("end", {"how": "failed", "text": lost["text"]})]
    found.append(("checkpoint", {"action": "read", "anchor": MODEL}))
    found.append(("checkpoint", {"action": "written", "anchor": LATER}))
    return [*found, counts, ("passed", {"points": points(run, rank)}), ("end", {"how": "left", "text": ""})]


def write(folder: Path, runs: tuple[Run, Run] | None = None) -> list[Path]:
    """Write the record, and return its logs: those of the first session, then those of the second, by rank."""
    first, second = runs or sessions()
    logs, before = write_session(folder, first, is_first=True)
    return logs + write_session(folder, second, before)[0]


def write_session(
    folder: Path, run: Run, before: list[str] | None = None, is_first: bool = False
) -> tuple[list[Path], list[str]]:
    """Write the logs of a session, and return them with their heads. `before`: the heads of those that they follow."""
    open_folder(folder)
    blobs, earlier = Blobs(folder), before or [""] * run.size
    begins = [run.begin(rank, blobs, before=earlier[rank]) for rank in range(run.size)]
    roster = bytes.fromhex(begins[0].fields["roster"])
    stated = {}
    for rank in range(run.size):
        made = heads.state(run.join(rank), rank, earlier[rank], run.session.record_key(rank))
        stated[rank] = heads.parse(made, rank, roster, run.listings)
    listed = blobs.put(heads.encode(stated))
    logs, found = [], []
    for rank, begin in enumerate(begins):
        logs.append(folder / log_name(roster, rank))
        file = LogFile(folder, logs[-1].name, run.session.record_key(rank))
        file.append("begin", begin.fields)
        if before and rank != KILLED:
            file.append("rejoined", {"generation": "3", "rank": rank, "before": before[rank]})
        file.append("heads", {"list": listed, "missing": 0})
        file.sign()
        for kind, fields in lines(run, rank, blobs, is_first):
            file.append(kind, fields)
            file.sign()
        found.append(file.head.hex())
        file.close()
    return logs, found
