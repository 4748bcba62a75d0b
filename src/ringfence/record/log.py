"""The log of one worker in one session: lines of canonical JSON, each with the digest of the one before (spec/record.md, 6).

A line of kind `signature` covers all lines before it. What follows the last of them says nothing, and is cut: a process that
was killed leaves such a tail. A line that is wrong with a signature after it is no such tail, and the log is refused.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import re
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ringfence import keys
from ringfence.errors import RecordError
from ringfence.record import json_object
from ringfence.record.json_object import Form, Json

FIRST: Final = keys.digest(keys.RECORD_LINE, b"")  # `previous` of the first line
BEGIN, PEERS, PASSED, SIGNATURE, END = "begin", "peers", "passed", "signature", "end"
KINDS: Final[dict[str, Form]] = {
    BEGIN: {
        "format": int,
        "run": str,
        "generation": str,
        "rank": int,
        "key": str,
        "tls_key": str,
        "certified": str,
        "roster": str,
        "listings": str,
        "suite": int,
        "table": str,
        "policy": str,
        "same_host": str,
        "policy_file": str,
        "policy_files": dict,
        "presentation": dict,
        "versions": dict,
        "before": str,
    },
    "heads": {"list": str, "missing": int},
    "code": {"script": str, "digest": str, "arguments": str, "packages": str},
    PEERS: {"peers": list},
    PASSED: {"points": list},
    "checkpoint": {"action": str, "anchor": str},
    "data": {"root": str, "files": int, "bytes": int},
    "lost": {"worker": int, "text": str},
    "rejoined": {"generation": str, "rank": int, "before": str},
    END: {"how": str, "text": str},
    SIGNATURE: {"signature": str},
}
_COMMON: Final = {"kind": str, "number": int, "previous": str, "at": int}
_COUNTS: Final = 7  # of a peer, with its rank
_LIST_ITEMS: Final = 256  # counts of peers, or points, in a line
HEAD: Final = re.compile(r"(?:[0-9a-f]{64})?")  # of a log, or nothing
_TEXTS: Final = {  # the form of texts that are more than words; `begin.verify` checks those of the first line
    "heads": {"list": HEAD},
    "code": {"digest": HEAD, "arguments": json_object.SHA_256, "packages": json_object.SHA_256},
    "checkpoint": {"action": re.compile("written|read"), "anchor": json_object.SHA_256},
    "data": {"root": json_object.SHA_256},
    "rejoined": {"before": HEAD},
    END: {"how": re.compile("left|failed")},
}
_POINT: Final = (int, str, int, int, int, str)  # the types of its values
_SIGNATURE: Final = re.compile(r"[0-9a-f]{128}")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_ESCAPED: Final = rb"\ud"  # in a line that has a surrogate, if it is written as it should be
_MARK: Final = b'"kind":"signature"'  # in no other line: texts have their quotes escaped


@dataclass(frozen=True)
class LogEntry:
    """One line. `fields` are those of its kind."""

    kind: str
    number: int
    previous: str
    at: int  # milliseconds since 1970, by the clock of its writer
    fields: Json = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the only encoding of this line, without its newline."""
        document = {**self.fields, "kind": self.kind, "number": self.number, "previous": self.previous, "at": self.at}
        return canonical(document)


@dataclass(frozen=True)
class Log:
    """A log whose chain and signatures were verified: its entries up to the last signature."""

    entries: tuple[LogEntry, ...]  #     without the signatures and the counts of peers
    peers: dict[int, list[int]]  #       the highest counts of each peer
    has_final_counts: bool  #            after the last of them only what passed and the end follow
    heads: tuple[bytes, ...]  #          the digest of each signature
    tail: int  #                         bytes after the last one, which were cut
    size: int  #                         bytes up to there, which are signed
    digest: str  #                       SHA-256 of those, in hexadecimal form

    @property
    def head(self) -> bytes:
        return self.heads[-1]

    @property
    def begin(self) -> LogEntry:
        return self.entries[0]

    @property
    def is_complete(self) -> bool:
        """Whether its writer said that the session had ended."""
        return self.entries[-1].kind == END


def canonical(value: object) -> bytes:
    """Return the only encoding of a value as JSON: sorted names, no white space, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest_of(line: bytes) -> bytes:
    """Return what the next line holds of this one, which is without its newline."""
    return keys.digest(keys.RECORD_LINE, line)


def sign(number: int, previous: bytes, at: int, key: Ed25519PrivateKey) -> LogEntry:
    """Return a signature of all lines before. It covers its own number and time as well: no later line may follow."""
    unsigned = LogEntry(SIGNATURE, number, previous.hex(), at)
    made = key.sign(keys.RECORD_SIGNATURE + unsigned.encode())
    return LogEntry(SIGNATURE, number, previous.hex(), at, {"signature": made.hex()})


def parse(line: bytes) -> LogEntry:
    """Parse a line without its newline: its form, not its place in a chain. Raises RecordError."""
    if len(line) >= keys.RECORD_LINE_BYTES:
        raise RecordError(f"a line of more than {keys.RECORD_LINE_BYTES:,} bytes")
    document = json_object.read(line, "the line")
    if not isinstance(document, dict) or document.get("kind") not in list(KINDS):  # it may be a list, which has no hash
        raise RecordError("not an object of a known kind: a newer ringfence may be able to read it")
    kind: str = document["kind"]
    found = json_object.fields(document, {**_COMMON, **KINDS[kind]}, f"the line of kind {kind}")
    if kind == PEERS:  # most of a log: checked here, in one step each
        if not _are_peers(found["peers"]):
            raise RecordError(f"the counts of a peer are not {_COUNTS} numbers")
    else:
        _check_values(found, keys.RECORD_DEPTH)
    if canonical(found) != line:
        raise RecordError("not written as ringfence writes it: take the file as it was before a tool formatted it")
    if _ESCAPED in line:
        _check_texts(found)
    if not json_object.SHA_256.fullmatch(found["previous"]):
        raise RecordError("its `previous` is not a digest")
    if found["at"] not in range(keys.RECORD_TIMES):
        raise RecordError("its time is before 1970 or after 6429")
    fields = {name: found[name] for name in KINDS[kind]}
    _check_form(kind, fields)
    return LogEntry(kind, found["number"], found["previous"], found["at"], fields)


def _check_form(kind: str, fields: Json) -> None:
    """Raise RecordError unless the values of an entry are what its kind says."""
    if kind == PASSED and not all(map(_is_point, fields["points"])):
        raise RecordError("a point does not have the form of one")
    for name, form in _TEXTS.get(kind, {}).items():
        if not form.fullmatch(fields[name]):
            raise RecordError(f"its `{name}` does not have the form of one")
    if kind != BEGIN:
        for name, value in fields.items():
            if type(value) is int and value < (-1 if kind == "lost" else 0):
                raise RecordError(f"its `{name}` is negative")
            if type(value) is list and len(value) > _LIST_ITEMS:
                raise RecordError(f"more than {_LIST_ITEMS} {name}")


def _are_peers(peers: list[Any]) -> bool:
    if not set(map(type, peers)) <= {list} or not set(map(len, peers)) <= {_COUNTS}:
        return False
    numbers = list(itertools.chain.from_iterable(peers))
    if not set(map(type, numbers)) <= {int}:
        return False
    return not numbers or (min(numbers) >= 0 and max(numbers) < json_object.NUMBERS)


def _is_point(each: object) -> bool:
    if not isinstance(each, list) or tuple(map(type, each)) != _POINT:
        return False
    worker, connection, channel, direction, frames, digest = each
    is_in_range = worker >= 0 and channel in range(keys.CHANNEL_LIMIT) and direction in (0, 1) and frames > 0
    return is_in_range and all(json_object.SHA_256.fullmatch(text) for text in (connection, digest))


def _check_values(container: Json | list[Any], depth: int) -> None:
    """Raise RecordError unless a list or an object consists of integers and texts. One call each: a log has many values."""
    if not depth:
        raise RecordError("lists and objects are nested too deeply")
    for each in container.values() if isinstance(container, dict) else container:
        kind = type(each)
        if kind is dict or kind is list:
            _check_values(each, depth - 1)
        elif kind is int:
            if not -json_object.NUMBERS < each < json_object.NUMBERS:
                raise RecordError("a value is too large")
        elif kind is not str:
            raise RecordError("a value is not an integer or a text")


def _check_texts(value: Any) -> None:
    """Raise RecordError if a text in a line has half of a pair of surrogates."""
    if isinstance(value, dict | list):
        for each in (*value, *value.values()) if isinstance(value, dict) else value:
            _check_texts(each)
    elif isinstance(value, str) and _SURROGATE.search(value):
        raise RecordError("a text that is not valid Unicode")


class _Chain:
    """The state of a reader: the digest of the last line, and the key that the first line names."""

    def __init__(self) -> None:
        self.head = FIRST
        self.number = 0
        self.ended = False
        self._key: Ed25519PublicKey | None = None

    def follow(self, line: bytes) -> LogEntry:
        """Check that a line, with its newline, is the next one, and return it. Raises RecordError."""
        if not line.endswith(b"\n"):
            raise RecordError("it has no end, or is too long")
        line = line[:-1]
        found = parse(line)
        if self.ended and found.kind != SIGNATURE:
            raise RecordError("it follows the end of the session")
        if (found.kind == BEGIN) != (self.number == 0):
            raise RecordError("the first line, and no other, is of kind begin")
        if found.number != self.number:
            raise RecordError(f"it has the number {found.number}: a line is missing, doubled or in another place")
        if found.previous != self.head.hex():
            raise RecordError("it does not follow the line before it: one of the two was changed, or is another log's")
        if found.kind == BEGIN:
            self._key = _public_key(found.fields["key"])
        elif found.kind == SIGNATURE:
            self._verify(found)
        self.ended = self.ended or found.kind == END
        self.number += 1
        self.head = digest_of(line)
        return found

    def _verify(self, found: LogEntry) -> None:
        assert self._key is not None  # a line of kind begin came before
        text = found.fields["signature"]
        if not _SIGNATURE.fullmatch(text):
            raise RecordError("its signature does not have the form of one")
        unsigned = LogEntry(SIGNATURE, found.number, found.previous, found.at)
        try:
            self._key.verify(bytes.fromhex(text), keys.RECORD_SIGNATURE + unsigned.encode())
        except InvalidSignature:
            raise RecordError("its signature is wrong: the log was changed after it was signed, or is forged") from None


def _public_key(text: str) -> Ed25519PublicKey:
    if not json_object.SHA_256.fullmatch(text):  # as long as one
        raise RecordError("its key does not have the form of one")
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))


def read(stream: BinaryIO) -> Log:
    """Verify the chain and the signatures of a log. Whose key made them, `begin.verify` says.

    Raises RecordError, which names the entry that is wrong.
    """
    chain, wrong = _Chain(), None
    entries: list[LogEntry] = []
    unsigned: list[LogEntry] = []
    peers: dict[int, list[int]] = {}
    has_final_counts = False
    heads: list[bytes] = []
    size = kept = 0
    state, digest = hashlib.sha256(), ""
    for line in iter(lambda: stream.readline(keys.RECORD_LINE_BYTES), b""):
        size += len(line)
        state.update(line)
        if chain.number >= keys.RECORD_LINES or size > keys.RECORD_LOG_BYTES:
            raise RecordError(f"more than {keys.RECORD_LINES:,} lines or {keys.RECORD_LOG_BYTES:,} bytes")
        if wrong is None:
            try:
                found = chain.follow(line)
            except RecordError as error:
                wrong = error
        if wrong is not None:
            if _MARK in line and line.endswith(b"\n"):
                raise RecordError(f"entry {chain.number}: {wrong}")
        elif found.kind == SIGNATURE:
            for entry in unsigned:
                has_final_counts = entry.kind == PEERS or (has_final_counts and entry.kind in (PASSED, END))
                if entry.kind == PEERS:
                    for rank, *counts in entry.fields["peers"]:
                        before = peers.get(rank, counts)
                        rise = all(map(operator.ge, counts, before))  # as they do, unless the worker lies
                        peers[rank] = counts if rise else list(map(max, counts, before))
                else:
                    entries.append(entry)
            unsigned.clear()
            heads.append(chain.head)
            kept, digest = size, state.hexdigest()
        else:
            unsigned.append(found)
    if not heads:
        raise RecordError("nothing in it is signed, so it says nothing")
    return Log(tuple(entries), peers, has_final_counts, tuple(heads), size - kept, kept, digest)


def last_signature(tail: bytes) -> bytes | None:
    """Return the digest of the last signature in the end of a log, which is not verified."""
    lines = tail.split(b"\n")[:-1]
    return next((digest_of(line) for line in reversed(lines) if _MARK in line), None)
