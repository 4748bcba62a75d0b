"""Signed records: envelopes before their signature is verified, statements, which a signer could write; logs; manifests."""

from __future__ import annotations

import functools
import io
import json
import tempfile
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ringfence import keys
from ringfence.errors import ProtocolError, RecordError
from ringfence.record import begin, envelope, heads, log, manifest, provenance, selftest, statement
from ringfence.record.json_object import Json
from ringfence.record.manifest import Entry, Tree
from tests.fuzz.target import Target
from tests.unit import manifest_samples, statement_samples
from tests.unit import record_samples as samples
from tests.unit.log_samples import Session, signed_again

_SESSION = Session(size=2)
_VECTORS = Path(__file__).parents[1] / "vectors" / "record.json"


def _envelopes() -> list[bytes]:
    return [samples.record(), envelope.sign(b"", samples.KEY), envelope.sign(b"{}", samples.OTHER_KEY)]


def _parse_envelope(data: bytes) -> None:
    assert envelope.parse(data).encode() == data


def _statements() -> list[bytes]:
    failed = samples.statement(checks={"start/begin": "failed", "order/producer": "skipped"}, passed=False, rates={})
    with tempfile.TemporaryDirectory() as folder:
        run = statement_samples.statement(Path(folder, "record"))
    return [samples.statement().encode(), failed.encode(), run.encode()]


def _parse_statement(data: bytes) -> None:
    found = statement.parse(data)
    assert statement.parse(found.encode()) == found
    if found.kind == keys.RECORD_PROVENANCE:
        provenance.parse(found)
        return
    said = selftest.parse(found)
    assert said["passed"] is selftest.verdict(said).startswith("PASSED")


def _manifests() -> list[bytes]:
    files = [Entry(name, len(name), keys.digest(name)) for name in sorted(manifest_samples.FILES)]
    return [manifest_samples.encoded(files[:count]) for count in (1, 3, len(files))]


def _read_manifest(data: bytes) -> None:
    assert manifest_samples.encoded(list(manifest.read(io.BytesIO(data), Tree()))) == data


_MANIFEST_WORDS = (
    *(
        b'{"digest":"',
        b'","name":"',
        b'","size":',
        b'{"bytes":',
        b',"files":',
        b',"root":"',
        b"}\n",
        b"%FF",
        b"%00",
        b"/",
    ),
    *(b"..", b"00", b"9" * 18, keys.RECORD_DATA.encode()),
)


_FURTHER = (
    {"kind": "rejoined", "generation": "2", "rank": 1, "before": "ab" * 32},
    {"kind": "heads", "list": "", "missing": 2},
    {"kind": "code", "script": "train.py", "digest": "12" * 32, "arguments": "34" * 32, "packages": "56" * 32},
    {"kind": "data", "root": "78" * 32, "files": 3, "bytes": 4096},
    {"kind": "peers", "peers": [[1, 7, 9, 0, 0, 70, 90]]},
    {"kind": "passed", "points": [[1, "9a" * 32, 0, 0, 1, "bc" * 32], [1, "9a" * 32, 0, 1, 2, "de" * 32]]},
)


@functools.cache
def _logs() -> list[bytes]:
    """The log in the vectors, one with entries of all kinds under the same key, and beginnings of both."""
    vectors = json.loads(_VECTORS.read_text())["log"]
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(vectors["record_private"]))
    short = vectors["file"].encode("ascii")

    def edit(lines: list[Json]) -> None:
        lines[2:2] = [{**entry, "at": lines[1]["at"]} for entry in _FURTHER]

    whole = [short, signed_again(short, key, edit)]
    lines = [each.splitlines(keepends=True) for each in whole]
    return [*whole, *(b"".join(each[:count]) for each in lines for count in (2, 3))]


def _read_log(data: bytes) -> None:
    """Whatever is accepted, the key signed: a beginning of one of the logs that the seeds are cut from."""
    found = log.read(io.BytesIO(data))
    kept = data[: len(data) - found.tail]
    genuine = next(each for each in _logs()[:2] if each.startswith(kept))
    assert found.entries == log.read(io.BytesIO(genuine)).entries[: len(found.entries)]


def _lines() -> list[bytes]:
    return [line for each in _logs()[:2] for line in each.splitlines()]


def _parse_line(data: bytes) -> None:
    found = log.parse(data)
    assert found.encode() == data
    if found.kind == log.BEGIN:
        begin.files_of(found)


def _listings() -> list[bytes]:
    return [begin.encode_listings(Session(size=size).listings) for size in (1, 3)]


def _decode_listings(data: bytes) -> None:
    assert begin.encode_listings(begin.decode_listings(data)) == data


def _heads() -> list[bytes]:
    session = _SESSION
    made = {rank: heads.state(session.join(rank), rank, "ab" * 32, session.record_key(rank)) for rank in range(2)}
    found = {rank: heads.parse(data, rank, session.roster, session.listings) for rank, data in made.items()}
    return [heads.encode(found), heads.encode({1: found[1]}), *made.values()]


def _decode_heads(data: bytes) -> None:
    """Whatever is accepted of a list, its workers have signed: nothing but what the seeds say."""
    for found in heads.decode(data, _SESSION.roster, _SESSION.listings).values():
        assert found["head"] == "ab" * 32


_WORDS = (
    *(b'"payload":', b'"payloadType":', b'"signatures":', b'"keyid":', b'"sig":', b"==", b'"_type":', b'"subject":'),
    *(b'"digest":', b'"sha256":', b'"predicate":', b'"passed":', b"true", b"null", b"1e999", b"[[", b"{}", b"\\ud800"),
    *(b'"kind":"signature"', b'"kind":', b"[]", b'"previous":', b'"number":', b'"at":', b"\n"),
    *(each.encode() for each in (keys.RECORD_PAYLOAD, keys.RECORD_STATEMENT, keys.RECORD_SELFTEST, keys.RECORD_RUN)),
)

TARGETS = (
    Target("record-envelope", _envelopes, _parse_envelope, (RecordError,), words=_WORDS),
    Target("data-manifest", _manifests, _read_manifest, (RecordError,), words=_MANIFEST_WORDS),
    Target("record-statement", _statements, _parse_statement, (RecordError,), words=_WORDS),
    Target("record-log", _logs, _read_log, (RecordError,), longest=16384, words=_WORDS),
    Target("record-log-line", _lines, _parse_line, (RecordError,), words=_WORDS),
    Target("record-listings", _listings, _decode_listings, (ProtocolError,)),
    Target("record-heads", _heads, _decode_heads, (RecordError,), bounded=300, words=_WORDS),
)
