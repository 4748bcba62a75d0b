"""Input that is parsed before authentication, or that comes from the store, besides the messages of admission."""

from __future__ import annotations

from functools import cache

from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from OpenSSL import crypto

from ringfence import keys
from ringfence.admission.entry import HOST_BYTES, format_address
from ringfence.collectives import Collective, Thresholds, choose
from ringfence.config.interfaces import parse_address
from ringfence.errors import AuthenticationError, ConfigurationError, ProtocolError
from ringfence.link import evidence_frame, frames
from ringfence.link.seal import Opener, Sealer
from ringfence.session.join.parent import AddressBook
from ringfence.transport.tls import Credentials, Tls, _self_signed
from tests.certificates import ODD_FEATURE, Authority, spiffe
from tests.fuzz.target import Target
from tests.unit.admission_samples import worker

_CONNECTION_KEY = keys.Secret(bytes(range(32)))


# -- the certificate that a peer presents in TLS ----------------------------------------------------------------------


class _Presented:
    """As much of a TLS connection as is asked for the peer's certificate: one that OpenSSL has taken."""

    def __init__(self, certificate: crypto.X509) -> None:
        self._certificate = certificate

    def get_peer_certificate(self, *, as_cryptography: bool) -> object:
        return self._certificate.to_cryptography() if as_cryptography else self._certificate


@cache
def _tls() -> Tls:
    return Tls(Credentials(), server=True)


def _certificates() -> list[bytes]:
    own = _self_signed(ec.generate_private_key(ec.SECP256R1()))
    other = Authority(key=ec.generate_private_key(ec.SECP384R1()))
    issued = Authority().sign("subject", rsa.generate_private_key(65537, 2048), (spiffe("a"),), extra=(ODD_FEATURE,))
    return [each.public_bytes(Encoding.DER) for each in (own, other.certificate, issued)]


def _read_certificate(data: bytes) -> None:
    try:
        taken = crypto.load_certificate(crypto.FILETYPE_ASN1, data)
    except crypto.Error:
        raise ProtocolError("OpenSSL refuses it, and ends the handshake") from None
    end = _tls()
    end._connection = _Presented(taken)  # type: ignore[assignment]
    assert len(end.peer_key_digest) == keys.DIGEST_BYTES


# -- the address that the store hands out -------------------------------------------------------------------------------


class _Store:
    """A store that has one value for everything."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    def set(self, key: str, value: str, /) -> None:
        raise AssertionError("nothing is published")

    def get(self, key: str, /) -> bytes:
        return self._value

    def check(self, keys: list[str], /) -> bool:
        return True


def _addresses() -> list[bytes]:
    return [
        b"10.0.0.7:29500",
        b"[fd00::1:2]:65535",
        b"node-1.example.org:1",
        b"[::ffff:10.0.0.7%eth0]:20000",
        b"[[h]]:1",
    ]


def _look_up(data: bytes) -> None:
    found = AddressBook(_Store(data), worker(1).entry).look_up(0)
    assert found is not None
    host, port = found
    assert 0 < len(host) <= HOST_BYTES and host.isascii() and host.isprintable() and 0 < port < 1 << 16
    assert parse_address(format_address(found), "x") == found


# -- the frame of a proof at peer verification --------------------------------------------------------------------------


def _proof_frames() -> list[bytes]:
    return [evidence_frame.seal_presentation(Sealer(_CONNECTION_KEY), bytes(size)) for size in (0, 1, 300)]


def _read_proof_frame(data: bytes) -> None:
    """As a worker reads it: the header, then as many bytes as it says."""
    header = data[: frames.HEADER_BYTES].ljust(frames.HEADER_BYTES, b"\0")
    length = evidence_frame.presentation_frame_bytes(header)
    assert frames.HOP_OVERHEAD <= length <= keys.PRESENTATION_BYTES + frames.HOP_OVERHEAD
    frame = (header + data[frames.HEADER_BYTES :])[:length].ljust(length, b"\0")
    shown = evidence_frame.open_presentation(Opener(_CONNECTION_KEY), frame)
    assert evidence_frame.seal_presentation(Sealer(_CONNECTION_KEY), shown) == frame in _proof_frames()


# -- the table of schedules, which rank 0 sends ---------------------------------------------------------------------


def _tables() -> list[bytes]:
    return [Thresholds().to_bytes(), Thresholds(*[0] * 8).to_bytes(), Thresholds(*[(1 << 64) - 1] * 8).to_bytes()]


def _read_table(data: bytes) -> None:
    """Whatever its thresholds are, every collective of every size has a schedule."""
    table = Thresholds.from_bytes(data)
    assert table.to_bytes() == data
    for kind in Collective:
        for size in (2, 5):
            for count in (0, 1 << 20):
                choose(kind, size, size - 1, 0, count, table)


TARGETS = (
    Target("tls-certificate", _certificates, _read_certificate, (ProtocolError,)),
    Target("store-address", _addresses, _look_up, (ConfigurationError,), longest=512, words=(b"[", b"]", b":", b"%")),
    Target("proof-frame", _proof_frames, _read_proof_frame, (AuthenticationError,)),
    Target("table", _tables, _read_table, (ProtocolError,), longest=128),
)
