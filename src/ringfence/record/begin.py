"""The first line of a log: whose it is, and the roster of its session (spec/record.md, 7).

The TLS key of the worker's join, whose digest is in its entry of the roster, signs the record's key once. So whatever admitted
the worker covers the record too, and nothing else had to be sent at the join.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_der_public_key

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.entry import WORLD_LIMIT, Entry, Listing
from ringfence.admission.peer_verification import Presentation
from ringfence.admission.policy_file.policy_file import PolicyFile
from ringfence.admission.proofs import bundle, jose, token
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.admission.roster import roster_digest
from ringfence.errors import ProtocolError, RecordError
from ringfence.record import json_object
from ringfence.record.json_object import Json
from ringfence.record.log import LogEntry
from ringfence.record.log_file import Blobs

FORMAT: Final = 1
_VERSIONS: Final = {"ringfence": str, "torch": str, "python": str}
_PRESENTATION: Final = {"kind": int, "at": int, "preimage": str, "digest": str, "parts": list}
_PART: Final = {"kind": int, "digest": str, "claims": list, "proof": str}


@dataclass(frozen=True)
class JoinRecord:
    """What a join leaves for the record: the roster as it was sent, and the signature of the record's key."""

    listings: tuple[Listing, ...]
    policy_digest: bytes
    same_host: str  #                    that of the policy, or stricter by RINGFENCE_SAME_HOST
    suite: int
    table: bytes
    roster_digest: bytes
    presentation: Presentation | None  # None: this worker is alone
    tls_key: bytes  #                    SubjectPublicKeyInfo in DER
    certified: bytes  #                  its signature of `certified_bytes`


def certified_bytes(entry_digest: bytes, roster: bytes, record_key: bytes) -> bytes:
    """Return what the TLS key signs."""
    return keys.RECORD_KEY + entry_digest + roster + record_key


def fields_of(
    join: JoinRecord,
    rank: int,
    record_key: bytes,
    blobs: Blobs,
    *,
    policy: PolicyFile | None,
    versions: Mapping[str, str],
    before: str,
) -> Json:
    """Return the fields of the first line, and write the files that it refers to. `before`: the head of the previous log."""
    contents = {} if policy is None else policy.contents
    own = join.listings[rank].entry
    return {
        "format": FORMAT,
        "run": own.run_id,
        "generation": own.generation,
        "rank": rank,
        "key": record_key.hex(),
        "tls_key": join.tls_key.hex(),
        "certified": join.certified.hex(),
        "roster": join.roster_digest.hex(),
        "listings": blobs.put(encode_listings(join.listings)),
        "suite": join.suite,
        "table": blobs.put(join.table),
        "policy": join.policy_digest.hex(),
        "same_host": join.same_host,
        "policy_file": "" if policy is None else policy.name,
        "policy_files": {name: blobs.put(content) for name, content in contents.items()},
        "presentation": {} if join.presentation is None else _presentation(join.presentation, blobs),
        "versions": dict(versions),
        "before": before,
    }


def encode_listings(listings: Sequence[Listing]) -> bytes:
    """Return the file with the roster's listings."""
    return encoding.number(len(listings), 4) + b"".join(each.encode() for each in listings)


def decode_listings(data: bytes) -> tuple[Listing, ...]:
    """Raises ProtocolError."""
    reader = encoding.Reader(data)
    if not 1 <= (count := reader.number(4)) <= WORLD_LIMIT:
        raise ProtocolError(f"a roster of {count} workers")
    found = tuple(Listing.read(reader) for _ in range(count))
    reader.end()
    return found


def _presentation(own: Presentation, blobs: Blobs) -> Json:
    parts = bundle.decode(own.proof, len(own.proof)) if own.kind == bundle.KIND else ((own.kind, own.proof),)
    return {
        "kind": own.kind,
        "at": own.at,
        "preimage": own.binding.preimage.hex(),
        "digest": hashlib.sha256(own.proof).hexdigest(),
        "parts": [_part(kind, proof, blobs) for kind, proof in parts],
    }


def _part(kind: int, proof: bytes, blobs: Blobs) -> Json:
    """Return what is kept of a proof: all of it, but of a token its claims only, and nothing of one by shared secret.

    A token is a credential: anyone who has it can present it elsewhere while it is valid.
    """
    found: Json = {"kind": kind, "digest": hashlib.sha256(proof).hexdigest(), "claims": [], "proof": ""}
    if kind == token.KIND:
        first, detached = token.decode(proof)
        claims = [jose.decode_base64(each.split(".")[1]) for each in (first, *detached.values())]
        found["claims"] = [blobs.put(each) for each in claims]
    elif kind != SharedSecret.kind:
        found["proof"] = blobs.put(proof)
    return found


# -- verifying --------------------------------------------------------------------------------------------------------


def verify(begin: LogEntry, blobs: Blobs) -> tuple[Listing, ...]:
    """Return the listings of a log's session, after checking that its key is that of the worker it names.

    Raises RecordError.
    """
    said = begin.fields
    if said["format"] != FORMAT:
        raise RecordError(f"a log of format {said['format']}; this release reads format {FORMAT}")
    texts = [said[name] for name in ("roster", "policy", "key", "tls_key", "certified")]
    digests = [*texts[:3], *([said["before"]] if said["before"] else [])]
    are_texts = all(json_object.HEX.fullmatch(text) for text in texts) and all(
        map(json_object.SHA_256.fullmatch, digests)
    )
    if not are_texts or said["suite"] not in range(256):
        raise RecordError("the first line is malformed: a value is not in hexadecimal form, or the suite is not a byte")
    json_object.fields(said["versions"], _VERSIONS, "the versions")
    roster, policy, record_key, tls_key, certified = map(bytes.fromhex, texts)
    try:
        listings = decode_listings(blobs.get(said["listings"]))
    except ProtocolError as error:
        raise RecordError(f"the roster that the first line names is malformed: {error}") from None
    if roster_digest(policy, listings, said["suite"], blobs.get(said["table"])) != roster:
        raise RecordError("the roster's digest is not that of the listings, the policy, the suite and the table")
    rank = said["rank"]
    if [each.entry.rank for each in listings] != list(range(len(listings))) or rank not in range(len(listings)):
        raise RecordError("the roster does not list every rank once, or not the one that wrote the log")
    own = listings[rank].entry
    session = (said["run"], said["generation"], len(listings))
    if {(each.entry.run_id, each.entry.generation, each.entry.world_size) for each in listings} != {session}:
        raise RecordError("the roster is of another run or generation, or lacks workers that its entries count")
    check_key(own, roster, record_key, tls_key, certified)
    return listings


def files_of(begin: LogEntry) -> list[str]:
    """Return the names of the files that a first line refers to. Raises RecordError if it is malformed."""
    said = begin.fields
    found = [said["listings"], said["table"], *said["policy_files"].values()]
    if said["presentation"]:
        shown = json_object.fields(said["presentation"], _PRESENTATION, "the presentation")
        for each in shown["parts"]:
            part = json_object.fields(each, _PART, "a part of the presentation")
            found += [*([part["proof"]] if part["proof"] != "" else []), *part["claims"]]
    return found


def check_key(own: Entry, roster: bytes, record_key: bytes, tls_key: bytes, certified: bytes) -> None:
    """Raise RecordError unless the TLS key of an entry signed a record's key for a session."""
    if hashlib.sha256(tls_key).digest() != own.tls_key_digest:
        raise RecordError(f"the TLS key is not that of rank {own.rank} in the roster")
    try:
        public = load_der_public_key(tls_key)
        if not isinstance(public, ec.EllipticCurvePublicKey):
            raise ValueError
        public.verify(certified, certified_bytes(own.digest, roster, record_key), ec.ECDSA(hashes.SHA256()))
    except (ValueError, UnsupportedAlgorithm, InvalidSignature):
        raise RecordError(f"the TLS key of rank {own.rank} did not sign the key of this log for this session") from None
