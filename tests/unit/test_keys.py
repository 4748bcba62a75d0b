"""The key schedule: labels that cannot be confused, secrets that cannot leak by accident, limits that fit the cipher."""

from __future__ import annotations

import copy
import hashlib
import hmac
import logging
import pickle
import traceback
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence import keys
from ringfence.keys import Secret

LABELS = {
    name: value
    for name, value in vars(keys).items()
    if name.isupper() and not name.startswith("_") and isinstance(value, bytes) and value.startswith(b"ringfence/")
}
MATERIAL = b"correct horse battery staple 123"


# -- Secret ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("show", [repr, str, "{}".format, "{!r}".format, lambda secret: f"{[secret]}"])
def test_a_secret_is_not_printed(show: object) -> None:
    shown = show(Secret(MATERIAL))  # type: ignore[operator]
    assert "correct horse" not in shown and MATERIAL.hex() not in shown and "redacted" in shown


def test_a_secret_stays_out_of_logs_and_tracebacks(caplog: pytest.LogCaptureFixture) -> None:
    secret = Secret(MATERIAL)
    logging.getLogger("ringfence.test").error("failed with %s", secret)
    try:
        raise ValueError(secret)
    except ValueError:
        assert "correct horse" not in traceback.format_exc()
    assert "redacted" in caplog.text and "correct horse" not in caplog.text


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_secret_is_never_pickled(protocol: int) -> None:
    with pytest.raises(TypeError, match="never pickled"):
        pickle.dumps({"key": Secret(MATERIAL)}, protocol)


def test_copies_of_a_secret_are_itself() -> None:
    secret = Secret(MATERIAL)
    assert copy.copy(secret) is secret and copy.deepcopy([secret])[0] is secret


def test_a_secret_has_no_other_attribute_and_no_hash() -> None:
    secret = Secret(MATERIAL)
    assert not hasattr(secret, "__dict__")
    with pytest.raises(TypeError):
        hash(secret)


def test_a_secret_keeps_its_own_bytes() -> None:
    material = bytearray(MATERIAL)
    secret = Secret(material)  # type: ignore[arg-type]
    material[:] = bytes(len(material))
    assert secret.reveal() == MATERIAL


def test_secrets_compare_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return hmac.compare_digest(left, right)

    monkeypatch.setattr(keys, "hmac", type("Hmac", (), {"compare_digest": staticmethod(compare)}))
    assert Secret(b"a") == Secret(b"a") and Secret(b"a") != Secret(b"b") and not keys.same(b"a", b"b")
    assert compared == [(b"a", b"a"), (b"a", b"b"), (b"a", b"b")]


def test_a_secret_equals_no_bytes() -> None:
    assert Secret(MATERIAL) != MATERIAL


# -- labels and derivations --------------------------------------------------------------------------------------------


def test_labels_carry_the_version_and_end_with_a_zero() -> None:
    assert len(LABELS) >= 20
    for label in LABELS.values():
        assert label.startswith(f"ringfence/{keys.VERSION} ".encode()) and label.endswith(b"\0")
        assert label.count(b"\0") == 1


def test_no_label_begins_another() -> None:
    for (one, left), (other, right) in combinations(LABELS.items(), 2):
        assert not left.startswith(right) and not right.startswith(left), (one, other)


parts = st.lists(st.binary(max_size=20), max_size=4)


@given(parts, parts)
def test_digests_of_different_parts_differ(one: list[bytes], other: list[bytes]) -> None:
    assert (keys.digest(keys.ENTRY, *one) == keys.digest(keys.ENTRY, *other)) == (one == other)


def test_digests_are_kept_apart_by_label_and_macs_by_key() -> None:
    assert keys.digest(keys.ENTRY, b"x") != keys.digest(keys.ROSTER, b"x")
    tags = {keys.mac(Secret(key), label, b"x") for key in (b"1", b"2") for label in (keys.ENTRY, keys.ROSTER)}
    assert len(tags) == 4


def test_hkdf_is_rfc_5869() -> None:
    """Test case 1 of the RFC's appendix A."""
    ikm, salt, info = bytes([11] * 22), bytes(range(13)), bytes(range(0xF0, 0xFA))
    expected = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    assert keys.derive(Secret(ikm), salt, info, 42).reveal().hex() == expected
    extracted = hmac.new(salt, ikm, hashlib.sha256).digest()
    assert keys.expand(Secret(extracted), info, 42).reveal().hex() == expected


def test_keys_are_bound_to_run_and_roster() -> None:
    shared = Secret(MATERIAL)
    assert keys.admission_key(shared, "run 1") != keys.admission_key(shared, "run 2")
    assert keys.session_key(shared, bytes(32)) != keys.session_key(shared, bytes([1] * 32))
    assert keys.session_key(shared, bytes(32)) != keys.session_key(Secret(bytes(32)), bytes(32))


# -- limits ------------------------------------------------------------------------------------------------------------


def test_limits_fit_the_cipher_and_the_header() -> None:
    """AES-GCM's security bound is about (blocks under a key)**2 / 2**128; below 2**-50 it is negligible."""
    blocks = (keys.SEGMENT_BYTES // 16 + 8) << keys.KEY_PHASE_SHIFT
    assert blocks**2 < 2 ** (128 - 50)
    assert keys.COUNTER_LIMIT >> keys.KEY_PHASE_SHIFT <= 2**32
    assert keys.TAG_BYTES == 16 and keys.IV_BYTES == 12 and keys.KEY_BYTES == 32
