"""The heads of the members' previous logs, which every worker of a session records (spec/record.md, 9).

They pass through the store, which is not trusted: each is signed by the key of its worker's log, which the TLS key in the
roster has certified.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.entry import Listing
from ringfence.errors import RecordError
from ringfence.record import begin, json_object, log
from ringfence.record.begin import JoinRecord
from ringfence.record.json_object import Json

_FORM: Final = {"rank": int, "key": str, "tls_key": str, "certified": str, "head": str, "signature": str}
_STATEMENT_BYTES: Final = 2048

Statements = Mapping[int, Json]


def _signed(roster: bytes, rank: int, head: str) -> bytes:
    return keys.RECORD_HEAD + roster + encoding.number(rank, 4) + bytes.fromhex(head)


def state(join: JoinRecord, rank: int, head: str, key: Ed25519PrivateKey) -> bytes:
    """Return what a worker publishes: the head of its previous log, or an empty text if it has none."""
    return log.canonical(
        {
            "rank": rank,
            "key": key.public_key().public_bytes_raw().hex(),
            "tls_key": join.tls_key.hex(),
            "certified": join.certified.hex(),
            "head": head,
            "signature": key.sign(_signed(join.roster_digest, rank, head)).hex(),
        }
    )


def verify(statement: object, rank: int, roster: bytes, listings: Sequence[Listing]) -> Json:
    """Return what a worker of a session published. Raises RecordError."""
    found = json_object.fields(statement, _FORM, "the head of a log")
    if found["rank"] != rank:
        raise RecordError(f"the head of rank {rank} is another worker's")
    texts = [found[name] for name in ("key", "tls_key", "certified", "signature")]
    if not all(json_object.HEX.fullmatch(each) for each in texts) or not log.HEAD.fullmatch(found["head"]):
        raise RecordError(f"the head of rank {rank} is malformed")
    key, tls_key, certified, signature = map(bytes.fromhex, texts)
    begin.check_key(listings[rank].entry, roster, key, tls_key, certified)
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, _signed(roster, rank, found["head"]))
    except (InvalidSignature, ValueError):
        raise RecordError(f"the head of rank {rank} was not signed with the key of its log") from None
    return found


def parse(data: bytes, rank: int, roster: bytes, listings: Sequence[Listing]) -> Json:
    """Parse and verify what a worker published. Raises RecordError."""
    if len(data) > _STATEMENT_BYTES:
        raise RecordError(f"the head of rank {rank} has more than {_STATEMENT_BYTES:,} bytes")
    return verify(json_object.read(data, f"the head of rank {rank}"), rank, roster, listings)


def encode(statements: Statements) -> bytes:
    """Return the list of heads that was agreed on, in the order of ranks."""
    return log.canonical([statements[rank] for rank in sorted(statements)])


def decode(data: bytes, roster: bytes, listings: Sequence[Listing]) -> dict[int, Json]:
    """Return those heads of a list that are right, by rank. Raises RecordError if it is no list."""
    if len(data) > _STATEMENT_BYTES * len(listings) + 2:
        raise RecordError("the list of heads is too long")
    found = json_object.read(data, "the list of heads")
    json_object.check_type(found, list, "the list of heads")
    assert isinstance(found, list)
    right: dict[int, Json] = {}
    for each in found:
        rank = each.get("rank") if isinstance(each, dict) else None
        if type(rank) is int and 0 <= rank < len(listings):
            with contextlib.suppress(RecordError):  # it counts as missing
                right[rank] = verify(each, rank, roster, listings)
    return right
