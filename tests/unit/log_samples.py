"""Logs of runs: workers whose keys are always the same, and what they recorded."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ringfence import keys
from ringfence.admission.entry import Entry, Listing
from ringfence.admission.peer_verification import Presentation
from ringfence.admission.policy_file.policy_file import PolicyFile
from ringfence.admission.roster import roster_digest
from ringfence.record import begin, log
from ringfence.record.begin import JoinRecord
from ringfence.record.json_object import Json
from ringfence.record.log import Log
from ringfence.record.log_file import Blobs, LogFile, log_name, open_folder
from tests.unit.admission_samples import worker

POLICY_DIGEST = bytes(range(32))
TABLE = b"table"
SUITE = 1
VERSIONS = {"ringfence": "0.1.0", "torch": "2.13.0", "python": "3.11.9"}
ENTRIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("lost", {"worker": 1, "text": 'it said "no", in \N{LATIN SMALL LETTER E WITH ACUTE}t\xe9'}),
    ("checkpoint", {"action": "written", "anchor": "ab" * 32}),
    ("end", {"how": "left", "text": ""}),
)


def spki(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


@dataclass(frozen=True)
class Session:
    """A session of some workers. Each has a TLS key and a key of its record; `name` makes other ones."""

    name: str = "first"
    size: int = 2
    kind: int = 1  # of proof
    hosts: tuple[str, ...] = ()  # of the workers, if they are not all on one machine
    run: str = "run-7"

    def tls_key(self, rank: int) -> ec.EllipticCurvePrivateKey:
        number = int.from_bytes(hashlib.sha256(f"{self.name} tls {rank}".encode()).digest(), "big")
        return ec.derive_private_key(number >> 1, ec.SECP256R1())

    def record_key(self, rank: int) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"{self.name} record {rank}".encode()).digest())

    def public(self, rank: int) -> bytes:
        return self.record_key(rank).public_key().public_bytes_raw()

    def entry(self, rank: int) -> Entry:
        digest = hashlib.sha256(spki(self.tls_key(rank))).digest()
        found = worker(rank, self.size, run_id=self.run, tls_key_digest=digest).entry
        return replace(found, host=self.hosts[rank]) if self.hosts else found

    @property
    def listings(self) -> tuple[Listing, ...]:
        return tuple(Listing(self.entry(rank), self.kind, bytes(32), b"endorsed") for rank in range(self.size))

    @property
    def roster(self) -> bytes:
        return roster_digest(POLICY_DIGEST, self.listings, SUITE, TABLE)

    def certified(self, rank: int) -> bytes:
        """What the TLS key of a worker signs, always in the same way."""
        message = begin.certified_bytes(self.entry(rank).digest, self.roster, self.public(rank))
        return self.tls_key(rank).sign(message, ec.ECDSA(hashes.SHA256(), deterministic_signing=True))

    def join(self, rank: int, presentation: Presentation | None = None) -> JoinRecord:
        return JoinRecord(
            listings=self.listings,
            policy_digest=POLICY_DIGEST,
            same_host="shared",
            suite=SUITE,
            table=TABLE,
            roster_digest=self.roster,
            presentation=presentation,
            tls_key=spki(self.tls_key(rank)),
            certified=self.certified(rank),
        )

    def begin(self, rank: int, blobs: Blobs, presentation: Presentation | None = None) -> dict[str, Any]:
        policy = PolicyFile((), name="policy.toml", contents={"policy.toml": b"version = 1\n"})
        join, public = self.join(rank, presentation), self.public(rank)
        return begin.fields_of(join, rank, public, blobs, policy=policy, versions=VERSIONS, before="")

    def write(
        self, folder: Path, rank: int = 0, entries: Sequence[tuple[str, dict[str, Any]]] = ENTRIES, every: int = 1
    ) -> Path:
        """Write a log with a signature after every so many entries, and return its path."""
        open_folder(folder)
        name = log_name(self.roster, rank)
        file = LogFile(folder, name, self.record_key(rank))
        file.append("begin", self.begin(rank, Blobs(folder)))
        file.sign()
        for number, (kind, fields) in enumerate(entries, 1):
            file.append(kind, fields)
            if number % every == 0:
                file.sign()
        file.close()
        return folder / name


def signed_again(content: bytes, key: Ed25519PrivateKey, edit: Callable[[list[Json]], None]) -> bytes:
    """Edit the lines of a log, and chain and sign them again, whatever they say: a worker that lies can do that."""
    documents = [json.loads(line) for line in content.splitlines()]
    edit(documents)
    head, found = log.FIRST, []
    for number, document in enumerate(documents):
        document |= {"number": number, "previous": head.hex()}
        if document.pop("signature", None) is not None:
            document["signature"] = key.sign(keys.RECORD_SIGNATURE + log.canonical(document)).hex()
        line = log.canonical(document)
        head = log.digest_of(line)
        found.append(line + b"\n")
    return b"".join(found)


def read(content: bytes) -> Log:
    return log.read(io.BytesIO(content))
