"""A second verifier of the record of a run, written from spec/record.md alone: it shares no code with the package.

It covers sections 6 to 9, 11 and 14: every log for itself, then the run, and the claims that need no evidence: every log
is genuine, both ends agree, run, complete, code, data, sealed, checkpoints. It leaves out section 13: it verifies no proof,
and does not judge the claims that rest on one (what workers presented, nobody else was admitted, all are attested).
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import re
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_der_public_key

SHOWN, REFUTED, NOT_SHOWN = "shown", "refuted", "not shown"
LONGEST_LINE, LONGEST_LOG, MOST_LINES, MOST_ITEMS = 262_144, 1 << 30, 1 << 20, 256

# What a value must be: a pattern for a text, a range for an integer, a list or a tuple of such, or an object with names.
TEXT, HEX, DIGEST, HEAD, SIGNATURE = (
    "[^\ud800-\udfff]*",
    "([0-9a-f]{2})*",
    "[0-9a-f]{64}",
    "([0-9a-f]{64})?",
    "[0-9a-f]{128}",
)
COUNT, INTEGER = range(1 << 63), range(1 - (1 << 63), 1 << 63)
CERTIFIED = {"rank": COUNT, "key": DIGEST, "tls_key": HEX, "certified": HEX}
STATED = CERTIFIED | {"head": HEAD, "signature": SIGNATURE}
PART = {"kind": INTEGER, "digest": TEXT, "proof": HEAD, "claims": [HEAD]}
PRESENTATION = {"kind": INTEGER, "at": INTEGER, "preimage": TEXT, "digest": TEXT, "parts": [PART]}
COMMON = {"kind": TEXT, "number": COUNT, "previous": DIGEST, "at": INTEGER}
KINDS: dict[str, dict[str, Any]] = {
    "begin": CERTIFIED
    | dict.fromkeys(("run", "generation", "same_host", "policy_file"), TEXT)
    | dict.fromkeys(("roster", "listings", "table", "policy"), DIGEST)
    | {"format": range(1, 2), "suite": range(256), "policy_files": {...: DIGEST}, "before": HEAD}
    | {"presentation": ({}, PRESENTATION), "versions": dict.fromkeys(("ringfence", "torch", "python"), TEXT)},
    "signature": {"signature": SIGNATURE},
    "heads": {"list": HEAD, "missing": COUNT},
    "code": {"script": TEXT, "digest": HEAD, "arguments": DIGEST, "packages": DIGEST},
    "peers": {"peers": [[COUNT] * 7]},
    "passed": {"points": [[COUNT, DIGEST, range(8), range(2), COUNT[1:], DIGEST]]},
    "checkpoint": {"action": "written|read", "anchor": DIGEST},
    "data": {"root": DIGEST, "files": COUNT, "bytes": COUNT},
    "lost": {"worker": range(-1, 1 << 63), "text": TEXT},
    "rejoined": {"generation": TEXT, "rank": COUNT, "before": HEAD},
    "end": {"how": "left|failed", "text": TEXT},
}

Entry = dict[str, Any]


class Refused(Exception):
    """A log that is not genuine: the place, and why."""


def require(condition: bool, why: str) -> None:
    if not condition:
        raise Refused(why)


def label(purpose: str) -> bytes:
    return b"ringfence/1 " + purpose.encode() + b"\0"


def digest(purpose: str, *parts: bytes) -> bytes:
    return hashlib.sha256(label(purpose) + b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def encode(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")


def decode(data: bytes) -> Any:
    """Parse JSON that has only one encoding."""
    try:
        found = json.loads(data.decode("ascii"))
        require(encode(found) == data, "is not in the one encoding")
    except (ValueError, RecursionError) as error:
        raise Refused("is not JSON") from error
    return found


def fits(value: Any, form: Any) -> bool:
    """Whether a value is of a form: a tuple has alternatives, a list of one the form of its items, a longer one of each."""
    if isinstance(form, tuple):
        return any(fits(value, each) for each in form)
    if isinstance(form, dict) and isinstance(value, dict):
        form = dict.fromkeys(value, form[...]) if ... in form else form
        return set(value) == set(form) and all(fits(name, TEXT) and fits(value[name], form[name]) for name in value)
    if isinstance(form, list) and isinstance(value, list):
        form = form * len(value) if len(form) == 1 else form
        return len(value) == len(form) and all(map(fits, value, form))
    if isinstance(form, str):
        return isinstance(value, str) and re.fullmatch(form, value) is not None
    return isinstance(form, range) and type(value) is int and value in form


@functools.lru_cache(1 << 12)
def is_signed(key: str, signature: str, message: bytes) -> bool:
    """Whether a signature of Ed25519 is right, or with a key in DER one of ECDSA."""
    try:
        if len(key) == 64:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(bytes.fromhex(signature), message)
            return True
        tls_key = load_der_public_key(bytes.fromhex(key))
        if isinstance(tls_key, ec.EllipticCurvePublicKey):
            tls_key.verify(bytes.fromhex(signature), message, ec.ECDSA(hashes.SHA256()))
            return True
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        pass
    return False


class Log(NamedTuple):
    """What is signed of a log: its entries, without the signatures; the digests of these; and what files say."""

    entries: list[Entry]
    signatures: list[str]
    workers: list[Entry]  # in the roster
    heads: list[Entry]  # of previous logs, as their workers signed them

    def all(self, kind: str, name: str) -> list[Any]:
        return [entry[name] for entry in self.entries if entry["kind"] == kind]

    @property
    def rank(self) -> int:
        return int(self.entries[0]["rank"])


def next_line(line: bytes, seen: list[Entry], previous: bytes) -> Entry:
    """Parse the line that follows these entries and signatures: section 6."""
    require(line.endswith(b"\n") and len(line) <= LONGEST_LINE, "is cut or too long")
    entry = decode(line[:-1])
    kind = entry["kind"] if isinstance(entry, dict) and entry.get("kind") in list(KINDS) else ""
    require(bool(kind) and fits(entry, COMMON | KINDS[kind]), "is of an unknown kind, or malformed")
    require(len(entry.get("peers", entry.get("points", []))) <= MOST_ITEMS, "has too many items")
    require((entry["number"], entry["previous"]) == (len(seen), previous.hex()), "does not follow the one before")
    require((kind == "begin") == (not seen), "is the first and no begin, or a second begin")
    last = next((each["kind"] for each in reversed(seen) if each["kind"] != "signature"), "")
    require(last != "end" or kind == "signature", "follows the end")
    if kind == "signature":
        message = label("record signature") + encode({name: entry[name] for name in entry if name != "signature"})
        require(is_signed(seen[0]["key"], entry["signature"], message), "its signature is wrong")
    return entry


def read_lines(content: bytes) -> tuple[list[Entry], list[str]]:
    """Return the entries of a log up to its last signature, and the digests of its signatures: section 6."""
    lines = re.findall(rb"[^\n]*\n|[^\n]+", content)
    require(len(content) <= LONGEST_LOG and len(lines) <= MOST_LINES, "the log is too long")
    previous, signed = digest("record line", b""), 0
    seen: list[Entry] = []
    signatures = []
    for number, line in enumerate(lines):
        try:
            seen.append(next_line(line, seen, previous))
        except Refused as error:
            behind = any(each.endswith(b"\n") and b'"kind":"signature"' in each for each in lines[number:])
            require(not behind, f"entry {number}: {error}")
            break
        previous = digest("record line", line[:-1])
        if seen[-1]["kind"] == "signature":
            signed = number
            signatures.append(previous.hex())
    require(signed > 0, "nothing in it is signed")
    return [entry for entry in seen[:signed] if entry["kind"] != "signature"], signatures


def read_listings(content: bytes) -> list[Entry]:
    """Decode a file of listings (admission.md), and check the ranks: section 7."""
    stream, found = io.BytesIO(content), []

    def take(size: int) -> bytes:
        taken = stream.read(size)
        require(len(taken) == size, "the listings are cut")
        return taken

    def number(size: int) -> int:
        return int.from_bytes(take(size), "big")

    def text(longest: int) -> bytes:
        taken = take(number(2))
        require(re.fullmatch(rb"[ -~]{1,%d}" % longest, taken) is not None, "the listings have a bad text")
        return taken

    size = number(4)
    for rank in range(size):
        start, run, generation = stream.tell(), text(128), text(64)
        require((number(4), number(4)) == (rank, size), "the listings have another rank")
        worker = {"run": run.decode(), "generation": generation.decode(), "tls": take(64)[32:], "host": text(255)}
        take(2)  # the port
        worker["entry"] = content[start : stream.tell()]
        require(len(take(1 + 32) + take(number(4))) <= 33 + 4096, "an endorsement is too long")
        found.append(worker | {"listing": content[start : stream.tell()]})
    require(stream.tell() == len(content), "something follows the listings")
    return found


def check_key(said: Entry, workers: list[Entry], roster: bytes) -> None:
    """Check that the worker which the roster has with this rank certified the key of its log: section 7."""
    require(said["rank"] < len(workers), "its rank is not in the roster")
    worker = workers[said["rank"]]
    message = label("record key") + digest("entry", worker["entry"]) + roster + bytes.fromhex(said["key"])
    require(hashlib.sha256(bytes.fromhex(said["tls_key"])).digest() == worker["tls"], "its TLS key is another")
    require(is_signed(said["tls_key"], said["certified"], message), "the key of the log is not certified")


def read_heads(content: bytes, workers: list[Entry], roster: bytes) -> list[Entry]:
    """Decode a list of heads of previous logs: section 9."""
    found = decode(content)
    require(fits(found, [STATED]), "the list of heads is malformed")
    ranks = [said["rank"] for said in found]
    require(ranks == sorted(set(ranks)), "the list of heads is not in order")
    for said in found:
        check_key(said, workers, roster)
        message = roster + said["rank"].to_bytes(4, "big") + bytes.fromhex(said["head"])
        require(
            is_signed(said["key"], said["signature"], label("record previous head") + message), "a head is not signed"
        )
    return list(found)


def read_log(path: Path) -> Log:
    """Read a log with the files that it names: sections 6, 7 and 9."""
    log = Log(*read_lines(path.read_bytes()), [], [])
    first = log.entries[0]
    require(path.name == f"{first['roster'][:16]}-{log.rank}.jsonl", "it has the name of another log")
    lists, parts = log.all("heads", "list"), first["presentation"].get("parts", [])
    names = [first["listings"], first["table"], *first["policy_files"].values(), *lists]
    names += [name for part in parts for name in (part["proof"], *part["claims"])]
    names += log.all("code", "arguments") + log.all("code", "packages")
    files = {"": b"[]"}
    for name in set(names) - {""}:
        blob = path.parent / "blobs" / name
        files[name] = blob.read_bytes() if blob.is_file() else b""
        require(hashlib.sha256(files[name]).hexdigest() == name, f"the file {name} is missing or another")
    log.workers.extend(read_listings(files[first["listings"]]))
    policy = (bytes.fromhex(first["policy"]), bytes([first["suite"]]), files[first["table"]])
    roster = digest("roster", *policy, *(worker["listing"] for worker in log.workers))
    require(first["roster"] == roster.hex(), "its roster is another")
    check_key(first, log.workers, roster)
    worker = log.workers[log.rank]
    require((worker["run"], worker["generation"]) == (first["run"], first["generation"]), "its run is another")
    for name, missing in zip(lists, log.all("heads", "missing"), strict=True):
        heads = read_heads(files[name], log.workers, roster)
        require(len(heads) + missing == len(log.workers), "the number of missing heads is another")
        log.heads.extend(heads)
    return log


def has_gap(session: list[Log], logs: list[Log]) -> bool:
    """Whether a log of a session has no end, although nobody else lost it, or names a head that is in no log: section 14."""
    known = {(log.rank, signature) for log in logs for signature in log.signatures}
    for log in session:
        blamed = [rank for other in session if other is not log for rank in other.all("lost", "worker")]
        heads = [(log.rank, log.entries[0]["before"]), *((said["rank"], said["head"]) for said in log.heads)]
        heads += zip(log.all("rejoined", "rank"), log.all("rejoined", "before"), strict=True)
        if (log.entries[-1]["kind"] != "end" and log.rank not in blamed) or not {h for h in heads if h[1]} <= known:
            return True
    return False


def is_unsealed(log: Log) -> bool:
    """Whether a worker counts one that is not in the roster, or bytes inside the machine to or from another machine."""
    hosts = [worker["host"] for worker in log.workers]
    for rank, _, _, sent, received, _, _ in chain.from_iterable(log.all("peers", "peers")):
        if rank >= len(hosts) or ((sent or received) and hosts[rank] != hosts[log.rank]):
            return True
    return False


def compare(session: list[Log]) -> str:
    """Compare the points that both ends have: section 11."""
    ends: dict[tuple[Any, ...], dict[int, str]] = {}
    for log in session:
        for other, connection, channel, received, count, value in chain.from_iterable(log.all("passed", "points")):
            pair = (other, log.rank) if received else (log.rank, other)
            end = ends.setdefault((pair, connection, channel, count), {})
            is_right = other in range(len(log.workers)) and other != log.rank
            if not is_right or end.setdefault(received, value) != value or len(set(end.values())) > 1:
                return REFUTED
    is_compared = len(session[0].workers) == 1 or any(len(end) == 2 for end in ends.values())
    return SHOWN if is_compared else NOT_SHOWN


def descend(sessions: list[list[Log]], anchors: set[str], start: set[str]) -> bool:
    """Whether the run wrote these checkpoints, and each log read only what it or an earlier session wrote."""
    written: set[str] = set()
    for session in sessions:
        own: list[set[str]] = [set() for _ in session]
        for log, mine in zip(session, own, strict=True):
            for action, anchor in zip(log.all("checkpoint", "action"), log.all("checkpoint", "anchor"), strict=True):
                if action == "written":
                    mine.add(anchor)
                elif anchor not in mine | written | start:
                    return False
        written = written.union(*own)
    return anchors <= written


def verify(folder: Path, claims: dict[str, set[str]]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the refused logs with the reasons, and the state of each claim that is judged here: section 14.

    `claims` has what is claimed: `run`, `scripts`, `packages`, `data`, `checkpoints`, and `started_from` if there is one.
    """
    refused: dict[str, str] = {}
    by_roster: dict[str, list[Log]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        try:
            log = read_log(path)
            by_roster.setdefault(log.entries[0]["roster"], []).append(log)
        except Refused as error:
            refused[path.name] = str(error)
    sessions = sorted(by_roster.values(), key=lambda session: min(log.entries[0]["at"] for log in session))
    logs = [log for session in sessions for log in session]
    first, last = [log.entries[0] for log in logs], [log.entries[-1] for log in sessions[-1]] if sessions else []
    runs, compared = {each["run"] for each in first}, {compare(session) for session in sessions}
    follow = [(each["rank"], each["before"]) for each in first if each["before"]]
    is_whole = not refused and all(len(session) == len(session[0].workers) for session in sessions)
    has_gaps = not is_whole or len(runs) > 1 or any(has_gap(session, logs) for session in sessions)
    has_code = all(log.all("code", "script") for log in logs if log.entries[-1]["kind"] == "end")
    scripts, packages, roots = (
        {value for log in logs for value in log.all(kind, name)}
        for kind, name in (("code", "digest"), ("code", "packages"), ("data", "root"))
    )
    found = {  # whether it is refuted, and otherwise whether it is shown
        "genuine": (bool(refused), True),
        "agree": (REFUTED in compared, NOT_SHOWN not in compared),
        "run": (not runs <= claims["run"], is_whole),
        "complete": (has_gaps or len(follow) > len(set(follow)) or any(e.get("how") != "left" for e in last), True),
        "code": (not (scripts <= claims["scripts"] and packages <= claims["packages"]), is_whole and has_code),
        "data": (not roots <= claims["data"], bool(roots)),
        "sealed": (any(map(is_unsealed, logs)), is_whole),
        "checkpoints": (not descend(sessions, claims["checkpoints"], claims.get("started_from", set())), True),
    }
    states = {name: REFUTED if refuted else SHOWN if shown else NOT_SHOWN for name, (refuted, shown) in found.items()}
    return refused, states
