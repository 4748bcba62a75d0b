"""The vectors of spec/private-sum.md: computed a second time from the text and from primitives alone."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from fractions import Fraction
from pathlib import Path

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from tests.vectors import make_private_sum

VECTORS = json.loads((Path(__file__).parent / "private-sum.json").read_text())


def label(purpose: str) -> bytes:
    return b"ringfence/1 " + purpose.encode() + b"\0"


def digest(purpose: str, *parts: bytes) -> bytes:
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hashlib.sha256(label(purpose) + framed).digest()


def text(value: str) -> bytes:
    return struct.pack(">H", len(value)) + value.encode()


def expanded(key: bytes, info: bytes) -> bytes:
    return hmac.digest(key, info + b"\1", "sha256")


def steps(value: float, exponent: int) -> int:
    return round(Fraction(value) * Fraction(2) ** exponent)  # to nearest, ties to even


def wrapped(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def test_the_package_makes_the_vectors() -> None:
    assert json.loads(json.dumps(make_private_sum.vectors())) == VECTORS


def test_the_layout_is_that_of_the_text() -> None:
    members = b"".join(
        text(name) + struct.pack(f">{len(ranks)}I", *ranks) for name, ranks in sorted(VECTORS["members"].items())
    )
    pairs = b"".join(struct.pack(">II", *pair) for pair in sorted(VECTORS["pairs"]))
    group = bytes.fromhex(VECTORS["group_digest"])
    assert digest("private sum layout", group, members, pairs).hex() == VECTORS["layout"]


def test_pairs_are_those_of_the_text() -> None:
    """Three members with every other one, in turn by their workers; and a path inside each."""
    assert sorted(VECTORS["pairs"]) == [[0, 1], [0, 3], [1, 4], [2, 3], [2, 4]]
    assert VECTORS["circulant"]["6 members, degree 3"] == sorted(
        sorted((place, (place + by) % 6)) for by, count in ((1, 6), (3, 3)) for place in range(count)
    )


def test_seeds_and_keys_are_those_of_the_text() -> None:
    for pair, drawn, seed, key in zip(
        VECTORS["pairs"], VECTORS["draws"], VECTORS["seeds"], VECTORS["mask_keys"], strict=True
    ):
        extracted = hmac.digest(bytes.fromhex(VECTORS["session_key"]), bytes.fromhex(drawn), "sha256")
        info = label("private sum seed") + bytes.fromhex(VECTORS["layout"]) + struct.pack(">II", *pair)
        assert expanded(extracted, info).hex() == seed
        call = struct.pack(">Q", VECTORS["call"])
        assert expanded(bytes.fromhex(seed), label("aes-256-ctr private sum mask") + call).hex() == key


def test_contributions_are_those_of_the_text() -> None:
    count = len(VECTORS["values"])
    exponent = max(e for e in range(-126, 127) if count * steps(VECTORS["bound"], e) < 2**31)
    for rank, values in enumerate(VECTORS["values"]):
        masked = [steps(struct.unpack("f", struct.pack("f", value))[0], exponent) for value in values]
        for pair, key in zip(VECTORS["pairs"], VECTORS["mask_keys"], strict=True):
            if rank in pair:
                cipher = Cipher(algorithms.AES(bytes.fromhex(key)), modes.CTR(bytes(16))).encryptor()
                stream = struct.unpack(f"<{len(values)}i", cipher.update(bytes(4 * len(values))))
                sign = 1 if rank == pair[0] else -1
                masked = [each + sign * word for each, word in zip(masked, stream, strict=True)]
        assert [wrapped(each) for each in masked] == VECTORS["contributions"][rank]
    sums = [wrapped(sum(column)) for column in zip(*VECTORS["contributions"], strict=True)]
    assert sums == VECTORS["sum_in_steps"]
    rounded = [struct.unpack("f", struct.pack("f", each))[0] for each in sums]
    assert [each * 2.0**exponent for each in VECTORS["sum"]] == rounded


def test_steps_are_those_of_the_text() -> None:
    for each in VECTORS["fixed_point"]:
        limit = 2 ** (int(each["integers"][-2:]) - 1)
        fits = [e for e in range(-126, 127) if each["workers"] * steps(each["bound"], e) < limit]
        assert (each["exponent"], each["largest"]) == (fits[-1], steps(each["bound"], fits[-1]))


def test_votes_are_those_of_the_text() -> None:
    count, exponent = len(VECTORS["values"]), VECTORS["fixed_point"][0]["exponent"]
    numbers = (VECTORS["call"], len(VECTORS["values"][0]), steps(VECTORS["bound"], exponent), exponent + 126)
    assert count == VECTORS["fixed_point"][0]["workers"]
    terms = struct.pack(">4Q", *numbers) + text("torch.float32") + text("torch.int32")
    assert terms.hex() == VECTORS["terms"]
    short = int.from_bytes(digest("private sum terms", terms)[:7], "big")
    assert VECTORS["votes"] == {"agrees": [0, short, -short], "group rank 2 refuses": [3, short, -short]}
