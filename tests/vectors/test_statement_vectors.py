"""The statement of a run, read by the tools of others: securesystemslib, and the bindings of in-toto for SLSA provenance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement as InTotoStatement
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey  # type: ignore[attr-defined]

from ringfence.record import envelope, provenance
from tests.unit import record_samples, statement_samples
from tests.unit.log_samples import read

SPEC = (Path(__file__).parents[2] / "spec/record.md").read_text()


@pytest.fixture
def record(tmp_path: Path) -> bytes:
    """A signed statement."""
    return envelope.sign(statement_samples.statement(tmp_path).encode(), record_samples.KEY)


def test_securesystemslib_verifies_the_envelope(record: bytes) -> None:
    name = envelope.parse(record).key_id
    key = SSlibKey.from_crypto(record_samples.KEY.public_key(), keyid=name)
    found = Envelope.from_dict(json.loads(record))
    assert list(found.verify([key], 1)) == [name]
    assert found.payload_type == "application/vnd.in-toto+json"


def test_the_bindings_of_in_toto_know_every_name(record: bytes, tmp_path: Path) -> None:
    """They refuse names that SLSA provenance does not have, and times that RFC 3339 does not have."""
    payload = json.loads(envelope.parse(record).payload)
    message = json_format.ParseDict(payload, statement_pb2.Statement())
    InTotoStatement.copy_from_pb(message).validate()
    assert message.predicate_type == "https://slsa.dev/provenance/v1"
    found = json_format.ParseDict(payload["predicate"], provenance_pb2.Provenance())
    assert found.build_definition.build_type == "https://ringfence.github.io/ringfence/record/run/v1"
    assert found.build_definition.external_parameters["run"] == found.run_details.metadata.invocation_id == "run-7"
    logs = [read(path.read_bytes()) for path in sorted(tmp_path.glob("*.jsonl"))]
    started = found.run_details.metadata.started_on
    assert started.ToMilliseconds() == min(each.begin.at for each in logs)
    assert [each.digest["sha256"] for each in found.run_details.byproducts] == [each.digest for each in logs]
    assert len(found.build_definition.resolved_dependencies) == 4


def test_the_bindings_refuse_another_name(record: bytes) -> None:
    """So the test above can fail."""
    predicate = json.loads(envelope.parse(record).payload)["predicate"]
    predicate["runDetails"]["note"] = ""
    with pytest.raises(json_format.ParseError, match="note"):
        json_format.ParseDict(predicate, provenance_pb2.Provenance())


def names(shape: object, before: str = "") -> list[str]:
    """The paths of all names in the shape of a predicate."""
    if isinstance(shape, list):
        return names(shape[0], before)
    if not isinstance(shape, dict):
        return [before]
    return [path for name, each in shape.items() for path in names(each, f"{before}.{name}" if before else name)]


def test_the_text_names_every_value_of_the_predicate() -> None:
    section = SPEC.split("## 12.")[1].split("\n## ")[0]
    found = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert found == names(provenance._PREDICATE)
