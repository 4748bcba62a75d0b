"""In-toto Statements: which artifacts (subjects) a record is about, and what it says of them (spec/record.md, 2)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final, NamedTuple

from ringfence.errors import RecordError
from ringfence.keys import RECORD_STATEMENT
from ringfence.record import json_object
from ringfence.record.json_object import Json

_STATEMENT: Final = {"_type": str, "subject": list, "predicateType": str, "predicate": dict}
_SUBJECT: Final = {"name": str, "digest": dict}
SHA256: Final = "sha256"  #    of a file
DIR_HASH: Final = "dirHash"  # SHA-256 of a list of files with their digests


class Subject(NamedTuple):
    """An artifact, by its digest."""

    name: str
    algorithm: str  # SHA256 or DIR_HASH
    digest: str  #    in hexadecimal form


@dataclass(frozen=True)
class Statement:
    """What a signer states. `kind` says what the predicate means."""

    subjects: tuple[Subject, ...]
    kind: str
    predicate: Json

    def encode(self) -> bytes:
        """Return the payload of a record."""
        subjects = [{"name": each.name, "digest": {each.algorithm: each.digest}} for each in self.subjects]
        document = {
            "_type": RECORD_STATEMENT,
            "subject": subjects,
            "predicateType": self.kind,
            "predicate": self.predicate,
        }
        return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")


def parse(payload: bytes) -> Statement:
    """Parse the payload of a record. Its signature was verified before. Raises RecordError."""
    document = json_object.fields(json_object.read(payload, "the payload"), _STATEMENT, "the statement")
    if document["_type"] != RECORD_STATEMENT:
        raise RecordError(f"the statement's type is not {RECORD_STATEMENT}")
    subjects = tuple(_subject(each) for each in document["subject"])
    if not subjects or len({each.name for each in subjects}) != len(subjects):
        raise RecordError("the statement has no subject, or two of one name")
    return Statement(subjects, document["predicateType"], document["predicate"])


def _subject(value: object) -> Subject:
    found = json_object.fields(value, _SUBJECT, "a subject")
    if len(found["digest"]) != 1:
        raise RecordError("a subject does not have exactly one digest")
    ((algorithm, digest),) = found["digest"].items()
    if algorithm not in (SHA256, DIR_HASH) or not isinstance(digest, str) or not json_object.SHA_256.fullmatch(digest):
        raise RecordError(f"a subject's digest is neither {SHA256} nor {DIR_HASH} in hexadecimal form")
    return Subject(found["name"], algorithm, digest)
