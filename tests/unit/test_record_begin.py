"""What the first line of a log keeps of the worker's own proof: no secret and no token."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from ringfence.admission.binding import Binding
from ringfence.admission.peer_verification import Presentation
from ringfence.admission.proofs import bundle, token
from ringfence.record import begin, log
from ringfence.record.log import LogEntry
from ringfence.record.log_file import Blobs, open_folder
from tests.unit import token_mint
from tests.unit.log_samples import Session

SESSION = Session()
TOKEN = token_mint.ES384.sign(token_mint.claims(eat_nonce="nonce of a test"))
DETACHED = token_mint.ES384.sign(token_mint.claims(eat_nonce="another"))
BY_TOKEN = token.encode(TOKEN, {"GPU-0": DETACHED})
SECRET, QUOTE = b"an HMAC of 32 bytes, as it would", b"evidence"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    open_folder(tmp_path / "record")
    return tmp_path / "record"


def kept(folder: Path, kind: int, proof: bytes) -> dict[str, Any]:
    """Write the first line with this proof, and return what it says of it."""
    presentation = Presentation(kind, 1_790_000_000, Binding(b"preimage"), proof)
    fields = SESSION.begin(0, Blobs(folder), presentation)
    entry = LogEntry("begin", 0, log.FIRST.hex(), 1, fields)
    assert log.parse(entry.encode()) == entry
    begin.verify(entry, Blobs(folder))
    found: dict[str, Any] = fields["presentation"]
    assert found["preimage"] == b"preimage".hex()
    assert found["digest"] == hashlib.sha256(proof).hexdigest()
    return found


def stored(folder: Path) -> bytes:
    return b"".join(each.read_bytes() for each in (folder / "blobs").iterdir())


def test_evidence_is_kept_whole(folder: Path) -> None:
    found = kept(folder, 3, QUOTE)
    digest = hashlib.sha256(QUOTE).hexdigest()
    assert found["parts"] == [{"kind": 3, "digest": digest, "claims": [], "proof": digest}]
    assert Blobs(folder).get(digest) == QUOTE


def test_of_a_secret_nothing_is_kept(folder: Path) -> None:
    found = kept(folder, 1, SECRET)
    digest = hashlib.sha256(SECRET).hexdigest()
    assert found["parts"] == [{"kind": 1, "digest": digest, "claims": [], "proof": ""}]
    assert SECRET not in stored(folder)


def test_of_a_token_the_claims_are_kept(folder: Path) -> None:
    found = kept(folder, token.KIND, BY_TOKEN)
    (part,) = found["parts"]
    assert part["proof"] == ""
    first, second = (json.loads(Blobs(folder).get(name)) for name in part["claims"])
    assert (first["eat_nonce"], second["eat_nonce"]) == ("nonce of a test", "another")
    for each in (TOKEN, DETACHED):
        for secret in (each, each.split(".")[2]):
            assert secret.encode() not in stored(folder)


def test_of_a_bundle_each_part_is_kept_as_its_kind_says(folder: Path) -> None:
    found = kept(folder, bundle.KIND, bundle.encode([(1, SECRET), (3, QUOTE), (token.KIND, BY_TOKEN)]))
    parts = [(part["kind"], bool(part["proof"]), len(part["claims"])) for part in found["parts"]]
    assert parts == [(1, False, 0), (3, True, 0), (token.KIND, False, 2)]
    content = stored(folder)
    assert SECRET not in content
    assert TOKEN.encode() not in content
    assert QUOTE in content


def test_a_worker_alone_presents_nothing(folder: Path) -> None:
    assert SESSION.begin(0, Blobs(folder))["presentation"] == {}
