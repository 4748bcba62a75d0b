"""Signed records: what is written is read again, what a statement may say, keys, and digests of code."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given
from hypothesis import strategies as st

from ringfence.errors import ConfigurationError, RecordError
from ringfence.keys import RECORD_BYTES, RECORD_SELFTEST
from ringfence.record import code, envelope, selftest, signing_key, statement
from ringfence.record.statement import Statement
from tests.unit import record_samples as samples

PUBLIC = samples.KEY.public_key()


@given(st.binary(max_size=300))
def test_a_signed_payload_is_read_again(payload: bytes) -> None:
    content = envelope.sign(payload, samples.KEY)
    assert envelope.parse(content).encode() == content
    assert envelope.verified_payload(content, PUBLIC) == payload


def test_a_payload_that_could_not_be_read_is_not_signed() -> None:
    with pytest.raises(RecordError, match=r"at most 1,048,576"):
        envelope.sign(bytes(RECORD_BYTES), samples.KEY)


def test_a_statement_is_read_again() -> None:
    made = samples.statement()
    assert statement.parse(made.encode()) == made
    assert selftest.parse(made) == samples.predicate()


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"_type": "https://in-toto.io/Statement/v0.1"}, "type is not https://in-toto.io/Statement/v1"),
        ({"subject": []}, "no subject"),
        ({"subject": [{"name": "a", "digest": {"sha256": "ab" * 32}}] * 2}, "two of one name"),
        ({"subject": [{"name": "a", "digest": {"md5": "ab" * 16}}]}, "not one of sha256, dirHash"),
        ({"subject": [{"name": "a", "digest": {"sha256": "AB" * 32}}]}, "not one of sha256, dirHash"),
        ({"subject": [{"name": "a", "digest": {}}]}, "exactly one digest"),
        ({"subject": ["a"]}, "not a JSON object"),
        ({"predicate": []}, "predicate is not an object"),
        ({"predicate": {"of": ["another", {"kind": 1 << 63}]}}, "a number is too large"),
        ({"predicate": {"of": [[float("1e308")]]}}, "a number is too large"),
        ({"note": 1}, "unknown field 'note'"),
    ],
)
def test_other_statements_are_refused(changes: dict[str, Any], refusal: str) -> None:
    document = {**json.loads(samples.statement().encode()), **changes}
    with pytest.raises(RecordError, match=refusal):
        statement.parse(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"passed": False}, "contradicts its checks"),
        ({"checks": {"a/b": "failed"}}, "contradicts its checks"),
        ({"checks": {}}, "no check"),
        ({"checks": {"a/b": "good"}}, "not passed, failed, skipped"),
        ({"checks": {"a/b": True}}, "checks is not a text"),
        ({"workers": True}, "workers is not an integer"),
        ({"workers": 2.0}, "workers is not an integer"),
        ({"environment": {"torch": None}}, "environment is not a text"),
        ({"rates": {"a": float("inf")}}, "rates is too large"),
        ({"more": 1}, "unknown field 'more'"),
    ],
)
def test_a_self_test_that_contradicts_itself_is_neither_signed_nor_read(changes: dict[str, Any], refusal: str) -> None:
    with pytest.raises(RecordError, match=refusal):
        samples.statement(**changes)
    with pytest.raises(RecordError, match=refusal):
        selftest.parse(Statement(samples.SUBJECTS, RECORD_SELFTEST, samples.predicate(**changes)))


def test_a_missing_field_is_named() -> None:
    short = {name: value for name, value in samples.predicate().items() if name != "quick"}
    with pytest.raises(RecordError, match="the predicate lacks 'quick'"):
        selftest.statement_of(short, samples.SUBJECTS)


def test_numbers_that_are_too_large_are_refused() -> None:
    for number in (b"1e999", b"NaN", b"9" * 5000, b"-%d" % (1 << 63)):
        payload = samples.statement().encode().replace(b"25000000000.0", number)
        with pytest.raises(RecordError, match=r"too large|not valid JSON"):
            statement.parse(payload)


def test_the_verdict_is_counted() -> None:
    found = samples.predicate(checks={"a/b": "passed", "a/c": "failed", "d/e": "skipped"}, passed=False, quick=True)
    assert selftest.verdict(selftest.parse(selftest.statement_of(found, samples.SUBJECTS))) == (
        "FAILED: 1 of 3 checks, quick"
    )


# -- keys ---------------------------------------------------------------------------------------------------------------


def test_a_key_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "record.key"
    made, new = signing_key.load_or_make(file)
    again, renewed = signing_key.load_or_make(file)
    assert (new, renewed) == (True, False)
    assert made.private_bytes_raw() == again.private_bytes_raw()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "record.key"
    signing_key.load_or_make(file)
    file.chmod(0o640)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        signing_key.load_or_make(file)


def test_other_keys_are_refused(tmp_path: Path) -> None:
    other = ec.generate_private_key(ec.SECP256R1())
    pem = other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for number, (content, said) in enumerate([(b"words", "not a private key"), (pem, "not an Ed25519 key")]):
        file = tmp_path / f"{number}.key"
        file.touch(0o600)
        file.write_bytes(content)
        with pytest.raises(ConfigurationError, match=said):
            signing_key.load_or_make(file)
    for content, said in (
        (pem, "give the public one"),
        (b"words", "not a public key"),
        (signing_key.public_pem(other.public_key()), "not an Ed25519 key"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigurationError, match=said):
            signing_key.read_public(content, "key.pem")


def test_the_public_half_is_read_again() -> None:
    assert signing_key.read_public(signing_key.public_pem(PUBLIC), "key.pem") == PUBLIC


# -- code ---------------------------------------------------------------------------------------------------------------


def test_the_digest_of_a_package_is_that_of_its_list_of_files(tmp_path: Path) -> None:
    files = {"some/b.py": b"1", "some/a/__init__.py": b"", "some/a.py": b"2", "some/c.so": b"3", "some/readme": b"4"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    lines = [
        f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n"
        for name in ("some/a.py", "some/a/__init__.py", "some/b.py")
    ]
    package, compiled = code.package_subjects(tmp_path / "some")
    assert package == ("some", "dirHash", hashlib.sha256("".join(lines).encode()).hexdigest())
    assert compiled == ("some/c.so", "sha256", hashlib.sha256(b"3").hexdigest())
