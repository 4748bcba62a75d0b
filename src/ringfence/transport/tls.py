"""TLS 1.3 for admission and control: keeps unauthenticated peers from reading along; who the peer is, admission decides.

The certificates are self-signed and made for one session, so TLS proves only that the peer holds the key it shows. That
key's digest and the connection's exporter go into the binding that admission's proofs cover.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import socket
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from OpenSSL import SSL, crypto
from OpenSSL._util import lib  # pyOpenSSL has no public call for signature algorithms and groups

from ringfence import keys
from ringfence.errors import ConfigurationError, PeerLostError, ProtocolError
from ringfence.transport.fork import register_fork_cleanup

_READ_BYTES: Final = 64 * 1024
_WRITE_BYTES: Final = 1 << 20
_EXPORTER_BYTES: Final = 32
_SIGNATURES: Final = b"ecdsa_secp256r1_sha256"  # the only one that TLS signs and verifies with
# RFC 5280's "no well-defined expiration": the key lives as long as its process, and clocks may disagree.
_NOT_BEFORE: Final = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER: Final = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


class Credentials:
    """This process's TLS key for one session; never stored. `hybrid`: no connection without post-quantum key agreement.

    ConfigurationError if this machine's OpenSSL cannot do that.
    """

    def __init__(self, *, hybrid: bool = True) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        self.hybrid = hybrid
        self.key_digest = _key_digest(key.public_key())
        self.context = _context(key, _self_signed(key))
        _set_groups(self.context, hybrid)


class Tls:
    """One end of a connection, without a socket: bytes from the network in, bytes for the network out."""

    def __init__(self, credentials: Credentials, *, server: bool) -> None:
        self._connection: SSL.Connection | None = SSL.Connection(credentials.context, None)
        self._own_key_digest = credentials.key_digest
        self._hybrid = credentials.hybrid
        self.established = False
        self.peer_closed = False
        self._records_left: int | None = keys.ADMISSION_RECORDS
        if server:
            self._live.set_accept_state()
        else:
            self._live.set_connect_state()
            self._handshake()

    def receive(self, data: bytes) -> bytes:
        """What `data` from the network decrypts to. ProtocolError if it is not TLS, or not from this peer."""
        try:
            while data:
                data = data[self._live.bio_write(data) :]
            if not self.established:
                self._handshake()
            return self._read() if self.established else b""
        except SSL.Error as error:
            raise ProtocolError(f"TLS failed: {_reason(error)}") from error

    def send(self, data: bytes) -> None:
        """Encrypt `data`; `outgoing` has the result. PeerLostError if this end of the connection is over."""
        view = memoryview(data)
        try:
            while view:
                view = view[self._live.send(view[:_WRITE_BYTES]) :]
        except SSL.Error as error:
            raise PeerLostError(f"TLS failed: {_reason(error)}") from error

    def close(self) -> None:
        """Queue a close_notify, so that the peer can tell an end from a cut."""
        with contextlib.suppress(SSL.Error):
            self._live.shutdown()

    def forget(self) -> None:
        """Drop the keys: whoever still asks hears that this end is over."""
        self._connection = None

    def outgoing(self) -> bytes:
        """What the network must carry now."""
        parts = []
        with contextlib.suppress(SSL.WantReadError):
            while True:
                parts.append(self._live.bio_read(_READ_BYTES))
        return b"".join(parts)

    def admit(self) -> None:
        """The peer is authenticated: it may send as many records as it likes."""
        self._records_left = None

    @property
    def own_key_digest(self) -> bytes:
        return self._own_key_digest

    @property
    def peer_key_digest(self) -> bytes:
        try:
            certificate = self._live.get_peer_certificate(as_cryptography=True)
            if certificate is None:
                raise ProtocolError("the peer showed no certificate")
            key = certificate.public_key()
            if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
                raise ProtocolError("the peer's TLS key is not of P-256")
            return _key_digest(key)
        except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
            # OpenSSL takes certificates that the stricter parser refuses, and an unauthenticated peer may send such a one.
            raise ProtocolError("the peer's certificate cannot be read") from error

    def exporter(self) -> bytes:
        """A value that only the two ends of this very connection share."""
        return self._live.export_keying_material(keys.TLS_EXPORTER, _EXPORTER_BYTES, b"")

    @property
    def group(self) -> str | None:
        """The key agreement, such as X25519MLKEM768."""
        return self._live.get_group_name()

    @property
    def _live(self) -> SSL.Connection:
        if self._connection is None:
            raise PeerLostError("this end of the connection is closed")
        return self._connection

    def _handshake(self) -> None:
        try:
            self._live.do_handshake()
        except SSL.WantReadError:
            return
        if self._hybrid and self.group not in keys.HYBRID_GROUPS:
            raise ProtocolError(
                f"TLS agreed on keys by {self.group}, and the policy asks for {' or '.join(keys.HYBRID_GROUPS)}, which is safe "
                "from quantum computers too: the OpenSSL of one of these two workers is too old for it, or is not given it. If "
                'that cannot be repaired, set key_agreement = "any" in the policy of every worker'
            )
        self.established = True

    def _read(self) -> bytes:
        parts = []
        try:
            while self._records_left != 0:
                parts.append(self._live.recv(_READ_BYTES))  # what one record holds
                if self._records_left is not None:
                    self._records_left -= 1
            raise ProtocolError(f"more than {keys.ADMISSION_RECORDS} TLS records, and still not admitted")
        except SSL.WantReadError:
            pass
        except SSL.ZeroReturnError:
            self.peer_closed = True
        return b"".join(parts)


class TlsStream:
    """A non-blocking socket under TLS. Never waits; whoever owns it selects on `fileno()`. A forked child does not keep it."""

    def __init__(self, connection: socket.socket, tls: Tls) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.tls = tls
        self.received = 0  # bytes off the network
        self._unsent = bytearray()
        register_fork_cleanup(self)

    def fileno(self) -> int:
        return self.socket.fileno()

    def receive(self, limit: int = 1 << 20) -> bytes:
        """What has arrived, taking at most `limit` bytes off the network. PeerLostError: the end; ProtocolError: not TLS."""
        plain = bytearray()
        taken = 0
        while taken < limit and not self.tls.peer_closed:
            try:
                data = self.socket.recv(min(_READ_BYTES, limit - taken))
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                return self._end(plain, error.strerror or str(error), error)
            if not data:
                return self._end(plain, "the connection was closed")
            taken += len(data)
            self.received += len(data)
            plain += self.tls.receive(data)
        if self.tls.peer_closed and not plain:
            raise PeerLostError("the peer closed the connection")
        return bytes(plain)

    def send(self, data: bytes) -> None:
        """Queue `data` and write what the kernel takes."""
        self.tls.send(data)
        self.flush()

    @property
    def wants_write(self) -> bool:
        return bool(self._unsent)

    def flush(self) -> None:
        """Write what the kernel takes; the rest waits for the socket to become writable."""
        self._unsent += self.tls.outgoing()
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._unsent.clear()
            raise PeerLostError(error.strerror or str(error)) from error

    def close(self) -> None:
        """Say goodbye if the kernel takes it, and let go of the socket and of the keys."""
        with contextlib.suppress(PeerLostError):
            self.tls.close()
            self.flush()
        self.forget()

    def forget(self) -> None:
        """Let go without a word: a forked child must not speak for its parent."""
        self.socket.close()
        self.tls.forget()

    def _end(self, plain: bytearray, reason: str, cause: OSError | None = None) -> bytes:
        """The stream is over: first hand out what came before; the next call meets the same end."""
        if plain:
            return bytes(plain)
        raise PeerLostError(reason) from cause


def _context(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> SSL.Context:
    context = SSL.Context(SSL.TLS_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_max_proto_version(SSL.TLS1_3_VERSION)
    context.set_tls13_ciphersuites(b"TLS_AES_256_GCM_SHA384")
    # A resumed session skips the certificates. OpenSSL still sends tickets, but they name sessions that nobody keeps.
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    # A peer's signature is computed with the key in its certificate, before anybody knows who it is: an RSA key of its choice
    # would cost twenty times as much as P-256.
    if lib.SSL_CTX_set1_sigalgs_list(context._context, _SIGNATURES) != 1:
        raise ConfigurationError(f"this machine's OpenSSL does not have {_SIGNATURES.decode()}: {_version()}")
    context.set_options(SSL.OP_NO_TICKET | SSL.OP_NO_COMPRESSION | SSL.OP_NO_RENEGOTIATION)
    context.use_privatekey(key)
    context.use_certificate(certificate)
    context.check_privatekey()
    context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, _accept_single_certificate)
    return context


def _set_groups(context: SSL.Context, hybrid: bool) -> None:
    """Explicitly: what OpenSSL would choose by itself, a configuration file of the whole machine can change."""
    best = (*keys.HYBRID_GROUPS, *keys.CLASSICAL_GROUPS)
    for groups in (best,) if hybrid else (best, keys.CLASSICAL_GROUPS):
        if lib.SSL_CTX_set1_curves_list(context._context, ":".join(groups).encode()) == 1:
            return
    raise ConfigurationError(
        f"{_version()} on this machine cannot agree on keys by {' or '.join(keys.HYBRID_GROUPS)}, which the policy asks for: "
        "install cryptography from its wheel, which brings an OpenSSL that can, or see what OPENSSL_CONF and OPENSSL_MODULES "
        'load. If that cannot be repaired, set key_agreement = "any" in the policy of every worker'
    )


def agreed_here(*, hybrid: bool = True) -> str:
    """What two ends on this machine agree on keys by, tried in memory. ConfigurationError or ProtocolError if they do not."""
    credentials = Credentials(hybrid=hybrid)
    client, server = Tls(credentials, server=False), Tls(credentials, server=True)
    while not (client.established and server.established):
        server.receive(client.outgoing())
        client.receive(server.outgoing())
    return client.group or "an unknown group"


def _version() -> str:
    return SSL.OpenSSL_version(SSL.OPENSSL_VERSION).decode("ascii", "replace")


def _accept_single_certificate(
    connection: SSL.Connection, certificate: crypto.X509, error: int, depth: int, verified: int
) -> bool:
    """Any single certificate of the form that workers make: admission verifies who holds its key. Called before TLS
    computes with that key."""
    try:
        if depth != 0 or certificate.get_signature_algorithm() != b"ecdsa-with-SHA256":
            return False
        key = certificate.get_pubkey()
    except (ValueError, crypto.Error):  # an algorithm or a key that OpenSSL does not know
        return False
    return key.type() == crypto.TYPE_EC and key.bits() == 256


def _self_signed(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ringfence worker")])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .sign(key, hashes.SHA256())
    )


def _key_digest(key: ec.EllipticCurvePublicKey) -> bytes:
    encoded = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(encoded).digest()


def _reason(error: SSL.Error) -> str:
    """OpenSSL's last words, without its tuple of library and function names."""
    stack = error.args[0] if error.args else ()
    return str(stack[-1][2]) if stack and isinstance(stack, list) else str(error) or type(error).__name__
