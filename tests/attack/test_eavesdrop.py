"""A capture puts the segments of a flow in order."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.attack.eavesdrop import Capture

PAYLOAD = bytes(range(200))


def packet(sequence: int, payload: bytes) -> bytes:
    """IPv4 and TCP, as far as a capture reads them."""
    ip = bytes([0x45, *[0] * 8, 6, 0, 0]) + bytes([127, 0, 0, 1] * 2)
    return ip + struct.pack(">HHIIB7x", 1000, 2000, sequence % (1 << 32), 0, 5 << 4) + payload


def assembled(first: int, segments: list[tuple[int, int]]) -> list[bytes]:
    capture = Capture("nowhere")
    capture._packets = [packet(first - 1, b"")] + [packet(first + a, PAYLOAD[a:b]) for a, b in segments]
    return capture.flows()


@given(st.data(), st.sampled_from([1, (1 << 32) - 100, (1 << 31) - 5]))
def test_repeated_late_and_resized_segments_are_put_in_order(data: st.DataObject, first: int) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, 199), max_size=8)) | {0, 200})
    whole = list(pairwise(cuts))
    again = data.draw(st.lists(st.tuples(st.integers(0, 99), st.integers(100, 200)), max_size=3))
    assert assembled(first, data.draw(st.permutations(whole + again))) == [PAYLOAD]


def test_a_missing_segment_is_an_error() -> None:
    with pytest.raises(AssertionError, match="a segment is missing"):
        assembled(1, [(0, 50), (60, 200)])
