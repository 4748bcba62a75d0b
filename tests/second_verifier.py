"""A second verifier of the record of a run, written from spec/record.md alone: it shares no code with the package.

It covers sections 6 to 9, 11 and 14: every log, then the run and the claims that need no evidence. It leaves out section 13:
it verifies no proof, nor the claims that rest on one (what workers presented, nobody else was admitted, all are attested).
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_der_public_key

SHOWN, REFUTED, NOT_SHOWN = "shown", "refuted", "not shown"
LONGEST_LINE, LONGEST_LOG, MOST_LINES, MOST_ITEMS = 262_144, 1 << 30, 1 << 20, 256
Entry = dict[str, Any]
# What a value must be: a pattern for a text, a range for an integer, a list or a tuple of such, or an object with names.
TEXT, HEX = "[^\ud800-\udfff]*", "([0-9a-f]{2})*"
DIGEST, HEAD, SIGNATURE = "[0-9a-f]{64}", "([0-9a-f]{64})?", "[0-9a-f]{128}"
COUNT, INTEGER = range(1 << 63), range(1 - (1 << 63), 1 << 63)
CERTIFIED = {"rank": COUNT, "key": DIGEST, "tls_key": HEX, "certified": HEX}
STATED = CERTIFIED | {"head": HEAD, "signature": SIGNATURE}
PART = {"kind": INTEGER, "digest": TEXT, "proof": HEAD, "claims": [DIGEST]}
PRESENTATION = {"kind": INTEGER, "at": INTEGER, "preimage": TEXT, "digest": TEXT, "parts": [PART]}
COMMON = {"kind": TEXT, "number": COUNT, "previous": DIGEST, "at": range(1 << 47)}
KINDS: dict[str, dict[str, Any]] = {
    "begin": CERTIFIED
    | {"run": "[ -~]{1,128}", "generation": "[ -~]{1,64}", "same_host": TEXT, "policy_file": TEXT}
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


def require(condition: bool, why: str) -> None:
    """Refuse a log with ValueError. Whatever cannot be decoded raises that too, or RecursionError."""
    if not condition:
        raise ValueError(why)


def label(purpose: str) -> bytes:
    return b"ringfence/1 " + purpose.encode() + b"\0"


def digest(purpose: str, *parts: bytes) -> bytes:
    return hashlib.sha256(label(purpose) + b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def encode(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")


def decode(data: bytes) -> Any:
    """Parse JSON that has only one encoding."""
    found = json.loads(data.decode("ascii"))
    require(encode(found) == data, "is not in the one encoding")
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
        else:
            tls_key = load_der_public_key(bytes.fromhex(key))
            require(isinstance(tls_key, ec.EllipticCurvePublicKey), "another kind of key")
            tls_key.verify(bytes.fromhex(signature), message, ec.ECDSA(hashes.SHA256()))  # type: ignore
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    return True


class Log:
    """A log that was verified with the files that it names: its entries up to the last signature, without signatures."""

    def __init__(self, path: Path) -> None:
        self.folder, self.lines = path.parent, list[Entry]()
        self.signatures = list[str]()  # the digests of these lines
        self.entries = self.read_lines(path.read_bytes())
        self.first, self.last = self.entries[0], self.entries[-1]
        self.rank, self.roster = int(self.first["rank"]), bytes.fromhex(self.first["roster"])
        require(path.name == f"{self.first['roster'][:16]}-{self.rank}.jsonl", "it has the name of another log")
        self.workers = self.read_listings(self.file(self.first["listings"]))
        self.check_first_line()
        self.heads = [said for entry in self.entries if entry["kind"] == "heads" for said in self.read_heads(entry)]

    def all(self, kind: str, *names: str) -> list[Any]:
        return [tuple(entry[name] for name in names) for entry in self.entries if entry["kind"] == kind]

    def file(self, name: str) -> bytes:
        blob = self.folder / "blobs" / name
        content = blob.read_bytes() if blob.is_file() else b""
        require(hashlib.sha256(content).hexdigest() == name, f"the file {name} is missing or another")
        return content

    def read_lines(self, content: bytes) -> list[Entry]:
        """Return the entries of a log up to its last signature: section 6."""
        lines = re.findall(rb"[^\n]*\n|[^\n]+", content)
        require(len(content) <= LONGEST_LOG and len(lines) <= MOST_LINES, "the log is too long")
        previous, signed = digest("record line", b""), 0
        for number, line in enumerate(lines):
            try:
                self.lines.append(self.next_line(line, previous))
            except (ValueError, RecursionError) as error:
                behind = any(each.endswith(b"\n") and b'"kind":"signature"' in each for each in lines[number:])
                require(not behind, f"entry {number}: {error}")
                break
            previous = digest("record line", line[:-1])
            if self.lines[-1]["kind"] == "signature":
                signed = number
                self.signatures.append(previous.hex())
        require(signed > 0, "nothing in it is signed")
        return [entry for entry in self.lines[:signed] if entry["kind"] != "signature"]

    def next_line(self, line: bytes, previous: bytes) -> Entry:
        require(line.endswith(b"\n") and len(line) <= LONGEST_LINE, "is cut or too long")
        entry = decode(line[:-1])
        kind = entry["kind"] if isinstance(entry, dict) and entry.get("kind") in list(KINDS) else ""
        require(bool(kind) and fits(entry, COMMON | KINDS[kind]), "is of an unknown kind, or malformed")
        require(len(entry.get("peers", entry.get("points", []))) <= MOST_ITEMS, "has too many items")
        require((entry["number"], entry["previous"]) == (len(self.lines), previous.hex()), "does not follow")
        require((kind == "begin") == (not self.lines), "is the first and no begin, or a second begin")
        last = next((each["kind"] for each in reversed(self.lines) if each["kind"] != "signature"), "")
        require(last != "end" or kind == "signature", "follows the end")
        if kind == "signature":
            message = label("record signature") + encode({name: entry[name] for name in entry if name != "signature"})
            require(is_signed(self.lines[0]["key"], entry["signature"], message), "its signature is wrong")
        return entry

    def read_listings(self, content: bytes) -> list[Entry]:
        """Decode a file of listings (admission.md), and check that all are of one session: section 7."""
        stream, found = io.BytesIO(content + b"\0"), []  # listings that are cut take this byte
        take = stream.read
        size = take(4)
        texts = [self.first[name].encode("ascii") for name in ("run", "generation")]
        session = b"".join(len(text).to_bytes(2, "big") + text for text in texts)
        for rank in range(int.from_bytes(size, "big")):
            start, expected = stream.tell(), session + rank.to_bytes(4, "big") + size
            require(take(len(expected)) == expected, "a listing is of another run, generation, rank or world size")
            tls_key, host = take(64)[32:], take(int.from_bytes(take(2), "big")).decode("ascii")
            require(fits(host, "[ -~]{1,255}"), "a listing has a bad host")
            take(2)  # the port
            entry = content[start : stream.tell()]
            length = take(1 + 32 + 4)[-4:]  # after the kind and the digest of the proof
            require(len(take(int.from_bytes(length, "big"))) <= 4096, "an endorsement is too long")
            listing = content[start : stream.tell()]
            found.append({"tls": tls_key, "host": host, "digest": digest("entry", entry), "listing": listing})
        require(stream.tell() == len(content), "the listings are cut, or something follows them")
        return found

    def check_first_line(self) -> None:
        """Check the roster, the key of the log and the files that lines name: section 7."""
        parts = [bytes.fromhex(self.first["policy"]), bytes([self.first["suite"]]), self.file(self.first["table"])]
        parts += [worker["listing"] for worker in self.workers]
        require(self.roster == digest("roster", *parts), "its roster is another")
        self.check_key(self.first)
        presented = self.first["presentation"].get("parts", [])
        names = [*self.first["policy_files"].values(), *chain(*self.all("code", "arguments", "packages"))]
        for name in (*names, *(name for part in presented for name in (part["proof"], *part["claims"]) if name)):
            self.file(name)

    def check_key(self, said: Entry) -> None:
        """Check that the worker which the roster has with this rank certified the key of its log."""
        require(said["rank"] < len(self.workers), "its rank is not in the roster")
        worker = self.workers[said["rank"]]
        message = label("record key") + worker["digest"] + self.roster + bytes.fromhex(said["key"])
        require(hashlib.sha256(bytes.fromhex(said["tls_key"])).digest() == worker["tls"], "its TLS key is another")
        require(is_signed(said["tls_key"], said["certified"], message), "the key of the log is not certified")

    def read_heads(self, entry: Entry) -> list[Entry]:
        """Decode a list of heads of previous logs: section 9."""
        found: list[Entry] = decode(self.file(entry["list"])) if entry["list"] else []
        require(fits(found, [STATED]), "the list of heads is malformed")
        ranks = [said["rank"] for said in found]
        is_counted = len(ranks) + entry["missing"] == len(self.workers)
        require(ranks == sorted(set(ranks)) and is_counted, "the list of heads is not in order, or lacks some")
        for said in found:
            self.check_key(said)
            message = self.roster + said["rank"].to_bytes(4, "big") + bytes.fromhex(said["head"])
            message = label("record previous head") + message
            require(is_signed(said["key"], said["signature"], message), "a head has a wrong signature")
        return found

    def is_unsealed(self) -> bool:
        """Whether it counts one that is not in the roster, or bytes inside the machine to or from another machine."""
        near = [worker["host"] == self.workers[self.rank]["host"] for worker in self.workers]
        counts = chain(*chain(*self.all("peers", "peers")))
        return any(rank >= len(near) or (any(inside) and not near[rank]) for rank, _, _, *inside, _, _ in counts)

    def named(self) -> set[tuple[str, int, str]]:
        """The heads of previous logs that it names, with the run and the rank of these."""
        found = {(said["rank"], said["head"]) for said in self.heads} | set(self.all("rejoined", "rank", "before"))
        found.add((self.rank, self.first["before"]))
        return {(self.first["run"], rank, head) for rank, head in found if head}

    def has_end(self) -> bool:
        return bool(self.last["kind"] == "end")

    def is_covered(self, logs: list[Log]) -> bool:
        """Whether it cannot have been cut: it has an end, or its worker was lost and another session names where it ends."""
        last = (self.first["run"], self.rank, self.signatures[-1])
        is_blamed = any((self.rank,) in each.all("lost", "worker") for each in logs if self.is_beside(each))
        return self.has_end() or (
            is_blamed and any(last in each.named() for each in logs if each.roster != self.roster)
        )

    def is_beside(self, other: Log) -> bool:
        return other.roster == self.roster and other is not self

    def has_counts(self, logs: list[Log]) -> bool:
        """Whether the last bytes exchanged with other machines are counted, by it or, if it has no end, by the others."""
        host = self.workers[self.rank]["host"]
        far = {rank for rank, worker in enumerate(self.workers) if worker["host"] != host}
        if not self.has_end():
            return far <= {each.rank for each in logs if self.is_beside(each) and each.has_end()}
        kinds = [entry["kind"] for entry in self.entries if entry["kind"] not in ("passed", "end")]
        return not far or kinds[-1] == "peers"


def has_gap(sessions: list[list[Log]]) -> bool:
    """Whether a run has a gap of section 14, other than a log or a head that is missing or refused."""
    logs = [log for session in sessions for log in session]
    before = [(log.rank, log.first["before"]) for log in logs if log.first["before"]]
    for session in sessions:
        for log in session:
            blamed = chain(*(other.all("lost", "worker") for other in session if other is not log))
            has_end = log.last["kind"] == "end" or (log.rank,) in blamed
            if not has_end or (session is sessions[-1] and log.last.get("how") != "left"):
                return True
    return len({log.first["run"] for log in logs}) > 1 or len(before) > len(set(before))


def agreement(session: list[Log]) -> str:
    """Compare the points that both ends have: section 11."""
    ends: dict[tuple[Any, ...], dict[int, str]] = {}
    for log in session:
        for other, connection, channel, received, count, value in chain(*chain(*log.all("passed", "points"))):
            pair = (other, log.rank) if received else (log.rank, other)
            end = ends.setdefault((pair, connection, channel, count), {})
            is_peer = other in range(len(log.workers)) and other != log.rank
            if not is_peer or end.setdefault(received, value) != value or len(set(end.values())) > 1:
                return REFUTED
    return SHOWN if len(session[0].workers) == 1 or any(len(end) == 2 for end in ends.values()) else NOT_SHOWN


def descend(sessions: list[list[Log]], anchors: set[str], start: set[str]) -> bool:
    """Whether these checkpoints were written, and each log read what it or an earlier session wrote, or the run began with."""
    earlier, written = set(start), set[str]()
    for session in sessions:
        known = [set(earlier) for _ in session]
        for log, own in zip(session, known, strict=True):
            for action, anchor in log.all("checkpoint", "action", "anchor"):
                if action == "written":
                    written.add(anchor)
                elif anchor not in own:
                    return False
                own.add(anchor)
        earlier.update(*known)
    return anchors <= written


def verify(folder: Path, claims: dict[str, set[str]]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the refused logs with the reasons, and the state of each claim: section 14. All of `claims` are evaluated."""
    refused, logs = dict[str, str](), list[Log]()
    for path in sorted(folder.glob("*.jsonl")):
        try:
            logs.append(Log(path))
        except (ValueError, RecursionError) as error:
            refused[path.name] = str(error)
    sessions = [[log for log in logs if log.roster == roster] for roster in {log.roster for log in logs}]
    sessions.sort(key=lambda session: min(log.first["at"] for log in session))
    known = {(log.first["run"], log.rank, signature) for log in logs for signature in log.signatures}
    is_whole = not refused and all(len(session) == len(session[0].workers) for session in sessions)
    is_whole = is_whole and set().union(*(log.named() for log in logs)) <= known
    is_covered = all(log.is_covered(logs) for log in logs)
    is_uncut, has_counts = is_whole and is_covered, all(log.has_counts(logs) for log in logs)
    agreements = {agreement(session) for session in sessions}
    code = list(chain(*(log.all("code", "digest", "packages") for log in logs)))
    is_code = all(script in claims["scripts"] and packages in claims["packages"] for script, packages in code)
    has_code = all(log.all("code") for log in logs)
    roots = {root for log in logs for (root,) in log.all("data", "root")}
    found = {  # whether it is refuted, and otherwise whether it is shown
        "genuine": (bool(refused), True),
        "agree": (REFUTED in agreements, NOT_SHOWN not in agreements),
        "run": (any(log.first["run"] not in claims["run"] for log in logs), is_whole),
        "complete": (not is_whole or has_gap(sessions), is_covered),
        "code": (not is_code, is_uncut and has_code),
        "data": (not roots <= claims["data"], is_uncut and bool(roots)),
        "sealed": (any(log.is_unsealed() for log in logs), is_uncut and has_counts),
        "checkpoints": (not descend(sessions, claims["checkpoints"], claims.get("started_from", set())), is_uncut),
    }
    return refused, {name: REFUTED if no else SHOWN if yes else NOT_SHOWN for name, (no, yes) in found.items()}
