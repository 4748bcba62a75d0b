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
SHA256: Final = "sha256"  #                  of a file, or of the digests of a model's files
DIR_HASH: Final = "dirHash"  #               SHA-256 of a list of files with their digests
CHECKPOINT: Final = "ringfenceCheckpoint"  # the anchor of a sealed checkpoint
DATA: Final = "ringfenceData"  #             the root of a data manifest
_ALGORITHMS: Final = (SHA256, DIR_HASH, CHECKPOINT, DATA)


class Subject(NamedTuple):
    """An artifact, by its digest."""

    name: str
    algorithm: str  # one of those above
    digest: str  #    in hexadecimal form

    def as_json(self) -> Json:
        """Return in-toto's resource descriptor of it."""
        return {"name": self.name, "digest": {self.algorithm: self.digest}}


@dataclass(frozen=True)
class Statement:
    """What a signer states. `kind` says what the predicate means."""

    subjects: tuple[Subject, ...]
    kind: str
    predicate: Json

    def encode(self) -> bytes:
        """Return the payload of a record."""
        document = {
            "_type": RECORD_STATEMENT,
            "subject": [each.as_json() for each in self.subjects],
            "predicateType": self.kind,
            "predicate": self.predicate,
        }
        return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")


def parse(payload: bytes) -> Statement:
    """Parse the payload of a record. Its signature was verified before. Raises RecordError."""
    document = json_object.fields(json_object.read(payload, "the payload"), _STATEMENT, "the statement")
    if document["_type"] != RECORD_STATEMENT:
        raise RecordError(f"the statement's type is not {RECORD_STATEMENT}")
    json_object.check_numbers(document["predicate"])
    subjects = tuple(subject_of(each) for each in document["subject"])
    if not subjects or len({each.name for each in subjects}) != len(subjects):
        raise RecordError("the statement has no subject, or two of one name")
    return Statement(subjects, document["predicateType"], document["predicate"])


def subject_of(value: object) -> Subject:
    """Parse a resource descriptor. Raises RecordError."""
    found = json_object.fields(value, _SUBJECT, "a subject")
    if len(found["digest"]) != 1:
        raise RecordError("a subject does not have exactly one digest")
    ((algorithm, digest),) = found["digest"].items()
    if algorithm not in _ALGORITHMS or not isinstance(digest, str) or not json_object.SHA_256.fullmatch(digest):
        raise RecordError(f"a subject's digest is not one of {', '.join(_ALGORITHMS)} in hexadecimal form")
    return Subject(found["name"], algorithm, digest)
