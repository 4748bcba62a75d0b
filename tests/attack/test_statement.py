"""Somebody without the owner's key changes the statement of a run, makes one, or passes another one off as it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence.errors import RecordError
from ringfence.record import envelope, provenance, selftest, statement
from ringfence.record.envelope import Envelope
from ringfence.record.statement import Statement
from tests.unit import record_samples, statement_samples
from tests.unit.flips import flips

PUBLIC = record_samples.KEY.public_key()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Statement:
    return statement_samples.statement(tmp_path_factory.mktemp("run") / "record")


@pytest.fixture(scope="module")
def record(made: Statement) -> bytes:
    return envelope.sign(made.encode(), record_samples.KEY)


def refused(content: bytes) -> str:
    with pytest.raises(RecordError) as error:
        provenance.parse(statement.parse(envelope.verified_payload(content, PUBLIC)))
    return str(error.value)


def test_the_statement_itself_is_accepted(made: Statement, record: bytes) -> None:
    assert statement.parse(envelope.verified_payload(record, PUBLIC)) == made


@pytest.mark.promise("A record that was changed, or that the given key did not sign, is refused.")
def test_every_changed_bit_is_refused(record: bytes, exhaustive: bool) -> None:
    for changed in flips(record, exhaustive):
        refused(changed)


@pytest.mark.promise("A record that was changed, or that the given key did not sign, is refused.")
def test_the_signature_of_another_key_is_refused(made: Statement, record: bytes) -> None:
    forged = envelope.sign(made.encode(), record_samples.OTHER_KEY)
    assert "signed with another key" in refused(forged)
    theirs = envelope.parse(forged)
    named = Envelope(theirs.payload, envelope.parse(record).key_id, theirs.signature)
    assert "signature is wrong" in refused(named.encode())


def test_the_signature_of_another_run_is_refused(made: Statement, record: bytes, tmp_path: Path) -> None:
    statement_samples.write_logs(tmp_path)
    (tmp_path / next(tmp_path.glob("*-1.jsonl")).name).unlink()
    other = provenance.statement_of(tmp_path, ())
    assert other.encode() != made.encode()
    found = envelope.parse(record)
    assert "signature is wrong" in refused(Envelope(other.encode(), found.key_id, found.signature).encode())


def test_a_self_test_is_not_read_as_a_run_nor_a_run_as_a_self_test(made: Statement) -> None:
    """The same key may sign both."""
    assert "not SLSA provenance" in refused(record_samples.record())
    with pytest.raises(RecordError, match="not about a self-test"):
        selftest.parse(made)


@pytest.mark.parametrize("kind", ["https://slsa.dev/provenance/v0.2", record_samples.statement().kind])
def test_a_predicate_under_another_type_is_refused(made: Statement, kind: str) -> None:
    other = Statement(made.subjects, kind, made.predicate)
    assert "not SLSA provenance" in refused(envelope.sign(other.encode(), record_samples.KEY))
    with pytest.raises(RecordError):
        selftest.parse(other)
