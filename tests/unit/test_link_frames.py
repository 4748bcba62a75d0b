"""The wire format of links: input is refused, or parses to a value that encodes to the same bytes."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringfence import keys
from ringfence.errors import AuthenticationError, ProtocolError
from ringfence.keys import CHANNEL_LIMIT, SEGMENT_BYTES, Secret
from ringfence.link.frames import (
    FORWARD_OVERHEAD,
    HEADER_BYTES,
    HOP_OVERHEAD,
    Call,
    Header,
    Type,
    frame_bytes,
    pack_header,
    read_header,
)
from ringfence.link.hello import HELLO_BYTES, Lane, LinkHandshake, LinkHello, read_hello, write_hello
from ringfence.link.segments import segment_bytes, segment_count
from tests.unit.flips import flips

SESSION_KEY = Secret(bytes(range(32)))
OTHER = Secret(bytes(range(64, 96)))

u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
calls = st.builds(Call, *[st.integers(0, 255)] * 4, root=u32, elements=u64, tag=st.integers(-(2**63), 2**63 - 1))
headers = st.builds(
    Header,
    type=st.sampled_from([int(kind) for kind in Type]),
    key_phase=u32,
    step=u32,
    unused=st.just(0),
    length=st.integers(0, SEGMENT_BYTES),
    label=u32,
    segment=u32,
    origin=u32,
    sequence=u64,
    counter=u64,
    instance=st.binary(min_size=16, max_size=16),
    call=calls.map(Call.pack),
)
digests = st.binary(min_size=32, max_size=32)
hellos = st.one_of(
    st.builds(LinkHello, u32, u32, st.sampled_from(list(Lane)), digests, digests, st.just(0)),
    st.builds(LinkHello, u32, u32, st.just(Lane.COLLECTIVE), digests, digests, st.integers(0, CHANNEL_LIMIT - 1)),
)


# -- headers and calls -------------------------------------------------------------------------------------------------


@given(headers)
def test_header_round_trip(header: Header) -> None:
    data = pack_header(*header)
    assert len(data) == HEADER_BYTES and read_header(data) == header
    assert Call.unpack(header.call).pack() == header.call
    if header.type == Type.SHARED:
        assert frame_bytes(header) == HEADER_BYTES
    else:
        overhead = FORWARD_OVERHEAD if header.type == Type.FORWARD else HOP_OVERHEAD
        assert frame_bytes(header) - header.length == overhead


@given(headers)
@settings(max_examples=20)
def test_header_with_flipped_bit_is_refused_or_round_trips(header: Header) -> None:
    for changed in flips(pack_header(*header)):
        try:
            other = read_header(changed)
        except ProtocolError:
            continue
        assert pack_header(*other) == changed and other != header


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_random_header_is_refused_or_round_trips(data: bytes) -> None:
    try:
        header = read_header(data)
    except ProtocolError:
        return
    assert pack_header(*header) == data and header.length <= SEGMENT_BYTES


@pytest.mark.parametrize(("at", "value"), [(0, 0), (0, 10), (1, 1), (2, 1), (3, 1), (12, 1), (15, 1), (16, 1), (17, 9)])
def test_malformed_headers_are_refused(at: int, value: int) -> None:
    data = bytearray(HEADER_BYTES)
    data[0] = Type.HOP
    read_header(bytes(data))
    data[at] = value
    with pytest.raises(ProtocolError):
        read_header(bytes(data))


# -- segments ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 64 << 20))
@example(0)
@example(128 << 10)
@example((128 << 10) + 1)
@example(2 << 20)
@example((2 << 20) + 1)
def test_segments_cover_a_chunk_without_splitting_elements(length: int) -> None:
    each, count = segment_bytes(length), segment_count(length)
    assert 0 < each <= SEGMENT_BYTES and each % 16 == 0
    assert (count - 1) * each < max(length, 1) <= count * each
    assert count <= max(4, -(-length // SEGMENT_BYTES))


# -- opening a connection ----------------------------------------------------------------------------------------------


@given(hellos)
def test_hello_round_trip(hello: LinkHello) -> None:
    data = write_hello(SESSION_KEY, hello)
    assert len(data) == HELLO_BYTES and read_hello(SESSION_KEY, data) == hello


@given(hellos)
@settings(max_examples=3)
def test_hello_with_flipped_bit_is_refused(hello: LinkHello) -> None:
    for changed in flips(write_hello(SESSION_KEY, hello)):
        with pytest.raises(AuthenticationError):
            read_hello(SESSION_KEY, changed)


@given(st.binary(max_size=2 * HELLO_BYTES))
def test_random_hello_is_refused(data: bytes) -> None:
    with pytest.raises(AuthenticationError):
        read_hello(SESSION_KEY, data)


@given(hellos)
def test_hello_of_another_session_is_refused(hello: LinkHello) -> None:
    with pytest.raises(AuthenticationError):
        read_hello(OTHER, write_hello(SESSION_KEY, hello))


@pytest.mark.promise("A link between workers that authenticate forwarded data differently is refused.")
@given(hellos)
def test_hello_of_the_other_version_is_refused(hello: LinkHello) -> None:
    """Version 1 is that of links before tags could cover what is forwarded, and without it."""
    assert keys.LINK_VERSIONS == (1, 2)
    for ours, theirs in (keys.LINK_VERSIONS, keys.LINK_VERSIONS[::-1]):
        data = write_hello(SESSION_KEY, hello, theirs)
        assert data[4] == theirs and read_hello(SESSION_KEY, data, theirs) == hello
        with pytest.raises(AuthenticationError, match="another version"):
            read_hello(SESSION_KEY, data, ours)
        with pytest.raises(AuthenticationError):  # its number is authenticated
            read_hello(SESSION_KEY, data[:4] + bytes([ours]) + data[5:], ours)


def test_hello_with_unknown_lane_is_refused() -> None:
    with pytest.raises(AuthenticationError, match="another version"):
        read_hello(SESSION_KEY, write_hello(SESSION_KEY, LinkHello(0, 1, max(Lane) + 1, bytes(32), bytes(32))))


@given(hellos, st.integers(1, 255))
def test_hello_with_a_channel_that_no_link_has_is_refused(hello: LinkHello, channel: int) -> None:
    if hello.lane != Lane.COLLECTIVE or channel >= CHANNEL_LIMIT:
        with pytest.raises(AuthenticationError, match="a channel that no link has"):
            read_hello(SESSION_KEY, write_hello(SESSION_KEY, hello._replace(channel=channel)))


def test_every_input_changes_every_secret_of_a_link() -> None:
    hello = LinkHello(0, 1, Lane.COLLECTIVE, bytes(32), bytes(32))
    zero, one = bytes(32), bytes([1] * 32)
    handshakes = [
        LinkHandshake(SESSION_KEY, zero, hello, zero),
        LinkHandshake(OTHER, zero, hello, zero),
        LinkHandshake(SESSION_KEY, one, hello, zero),
        LinkHandshake(SESSION_KEY, zero, hello, one),
        *(
            LinkHandshake(SESSION_KEY, zero, hello._replace(**change), zero)
            for change in ({"sender": 2}, {"receiver": 2}, {"lane": 1}, {"channel": 1}, {"group": one}, {"nonce": one})
        ),
    ]
    first = handshakes[0]
    secrets = [each.secrets(zero, b"key", b"ciphertext") for each in handshakes]
    secrets += [first.secrets(one, b"key", b"ciphertext"), first.secrets(zero, b"kez", b"ciphertext")]
    secrets += [first.secrets(zero, b"key", b"ciphertexu"), first.secrets(zero, b"keyc", b"iphertext")]
    seen = [half.reveal() for each in secrets for half in (each.forth, each.back)]
    seen += [each.acceptor_confirms(b"key") for each in handshakes] + [first.acceptor_confirms(b"kez")]
    seen += [each.dialler_confirms(b"key", b"ciphertext") for each in handshakes]
    seen += [first.dialler_confirms(b"kez", b"ciphertext"), first.dialler_confirms(b"key", b"ciphertexu")]
    assert len(set(seen)) == len(seen) == 4 * len(handshakes) + 2 * 4 + 3
