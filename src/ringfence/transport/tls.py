"""TLS 1.3 for admission and control: encrypts the connection; admission authenticates the peer.

The certificates are self-signed and created for one session, so TLS proves only that the peer holds the key of its
certificate. Admission's proofs cover that key's digest and the connection's exporter value.
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
from OpenSSL import SSL, crypto, version

from ringfence import keys
from ringfence.errors import ConfigurationError, PeerLostError, ProtocolError
from ringfence.transport.fork import register_fork_cleanup

# pyOpenSSL has no public call for signature algorithms and groups. A version that lacks the private ones is refused here, at
# import, and not in a connection.
try:
    from OpenSSL._util import lib

    _set_signatures = lib.SSL_CTX_set1_sigalgs_list
    _set_curves = lib.SSL_CTX_set1_curves_list
    _ = SSL.Context(SSL.TLS_METHOD)._context
except (ImportError, AttributeError) as error:
    raise ConfigurationError(
        f"pyOpenSSL {version.__version__} lacks a call that ringfence needs ({error}): install an older one with "
        "python -m pip install 'pyOpenSSL==26.4.*'"
    ) from error

_READ_BYTES: Final = 64 * 1024
_RECORD_BYTES: Final = 1 << 14  # the largest content of a TLS record
_WRITE_BYTES: Final = 1 << 20
_EXPORTER_BYTES: Final = 32
_SIGNATURES: Final = b"ecdsa_secp256r1_sha256"  # the only signature algorithm allowed
# RFC 5280's "no well-defined expiration": the key lives as long as its process, and clocks may disagree.
_NOT_BEFORE: Final = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER: Final = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


class Credentials:
    """The TLS key of this process for one session; never stored.

    Args:
        hybrid: Require post-quantum key agreement. Raises ConfigurationError if OpenSSL on this machine does not support it.
        exporter: The label of the connections' exporter values, which proofs cover: one for each purpose of a connection.
        record_key: The public key of this worker's record, which the TLS key signs once (spec/record.md, 7).
    """

    def __init__(
        self, *, hybrid: bool = True, exporter: bytes = keys.TLS_EXPORTER, record_key: bytes | None = None
    ) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        self.hybrid = hybrid
        self.exporter = exporter
        self.record_key = record_key
        self.public_key = _encoded(key.public_key())
        self.key_digest = hashlib.sha256(self.public_key).digest()
        self._signer = key if record_key is not None else None
        self.context = _context(key, _self_signed(key))
        _set_groups(self.context, hybrid)

    def sign_once(self, message: bytes) -> bytes:
        """Sign a message with the TLS key, and drop the key: connections keep their own reference."""
        signer, self._signer = self._signer, None
        assert signer is not None
        return signer.sign(message, ec.ECDSA(hashes.SHA256()))


class Tls:
    """One endpoint of a TLS connection without a socket: takes bytes from the network and returns bytes for it."""

    def __init__(self, credentials: Credentials, *, server: bool) -> None:
        self._connection: SSL.Connection | None = SSL.Connection(credentials.context, None)
        self.own_key_digest = credentials.key_digest
        self._hybrid = credentials.hybrid
        self._exporter_label = credentials.exporter
        self.established = False
        self.peer_closed = False
        self._records_left: int | None = keys.ADMISSION_RECORDS
        if server:
            self._live.set_accept_state()
        else:
            self._live.set_connect_state()
            self._handshake()

    def receive(self, data: bytes) -> bytes:
        """Decrypt `data` from the network. Raises ProtocolError if it is not valid TLS of this connection."""
        try:
            while data:
                data = data[self._live.bio_write(data) :]
            if not self.established:
                self._handshake()
            return self._read() if self.established else b""
        except SSL.Error as error:
            raise ProtocolError(f"TLS failed: {_reason(error)}") from error

    def send(self, data: bytes) -> None:
        """Encrypt `data`; `outgoing` returns the result. Raises PeerLostError if this endpoint is closed."""
        view = memoryview(data)
        try:
            while view:
                view = view[self._live.send(view[:_WRITE_BYTES]) :]
        except SSL.Error as error:
            raise PeerLostError(f"TLS failed: {_reason(error)}") from error

    def close(self) -> None:
        """Queue a close_notify, so that the peer can tell a regular end from a truncation."""
        with contextlib.suppress(SSL.Error):
            self._live.shutdown()

    def forget(self) -> None:
        """Delete the keys; later calls raise PeerLostError."""
        self._connection = None

    def outgoing(self) -> bytes:
        """Return the bytes to send on the network."""
        live = self._live
        parts: list[bytes] = []
        try:
            while not parts or len(parts[-1]) == _READ_BYTES:  # if it is less, nothing is left
                parts.append(live.bio_read(_READ_BYTES))
        except SSL.WantReadError:
            pass
        return b"".join(parts)

    def admit(self) -> None:
        """Lift the limit on records, because the peer is authenticated."""
        self._records_left = None

    @property
    def peer_key_digest(self) -> bytes:
        try:
            certificate = self._live.get_peer_certificate(as_cryptography=True)
            if certificate is None:
                raise ProtocolError("the peer presented no certificate")
            key = certificate.public_key()
            if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
                raise ProtocolError("the peer's TLS key is not a P-256 key")
            return hashlib.sha256(_encoded(key)).digest()
        except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
            # OpenSSL accepts certificates that the stricter parser of cryptography rejects; a peer may send one.
            raise ProtocolError("the peer's certificate cannot be parsed") from error

    def exporter(self) -> bytes:
        """A value that only the two endpoints of this connection know."""
        return self._live.export_keying_material(self._exporter_label, _EXPORTER_BYTES, b"")

    @property
    def group(self) -> str | None:
        """The key agreement group, such as X25519MLKEM768."""
        return self._live.get_group_name()

    @property
    def _live(self) -> SSL.Connection:
        if self._connection is None:
            raise PeerLostError("the connection is closed")
        return self._connection

    def _handshake(self) -> None:
        try:
            self._live.do_handshake()
        except SSL.WantReadError:
            return
        if self._hybrid and self.group not in keys.HYBRID_GROUPS:
            raise ProtocolError(
                f"TLS used {self.group} for key agreement, but the policy requires {' or '.join(keys.HYBRID_GROUPS)}, which "
                "resists quantum computers too: OpenSSL on one of the two workers is too old, or its configuration disables "
                'it. If that cannot be changed, set key_agreement = "any" in the policy of every worker'
            )
        self.established = True

    def _read(self) -> bytes:
        parts = []
        live = self._live
        try:
            while self._records_left != 0:
                parts.append(live.recv(_RECORD_BYTES))
                if self._records_left is not None:
                    self._records_left -= 1
            raise ProtocolError(f"more than {keys.ADMISSION_RECORDS} TLS records before admission")
        except SSL.WantReadError:
            pass
        except SSL.ZeroReturnError:
            self.peer_closed = True
        return b"".join(parts)


class TlsStream:
    """A non-blocking socket with TLS. Never blocks: its owner polls `fileno()`. Closed in forked children."""

    def __init__(self, connection: socket.socket, tls: Tls) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.tls = tls
        self.received = 0  # bytes from the network
        self._unsent = bytearray()
        register_fork_cleanup(self)

    def fileno(self) -> int:
        return self.socket.fileno()

    def receive(self, limit: int = 1 << 20, *, drain: bool = True) -> bytes:
        """Return decrypted data, from at most `limit` bytes off the network. Raises PeerLostError at the end of the stream.

        With `drain`, reads until the kernel has nothing left, as an edge-triggered poller requires. Without, a read that
        returns less than was asked for is the last one: a level-triggered poller reports what arrives after it.
        """
        plain = bytearray()
        taken = 0
        while taken < limit and not self.tls.peer_closed:
            size = min(_READ_BYTES, limit - taken)
            try:
                data = self.socket.recv(size)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                return self._end(plain, error.strerror or str(error), error)
            if not data:
                return self._end(plain, "the connection was closed")
            taken += len(data)
            self.received += len(data)
            plain += self.tls.receive(data)
            if len(data) < size and not drain:
                break
        if self.tls.peer_closed and not plain:
            raise PeerLostError("the peer closed the connection")
        return bytes(plain)

    def send(self, data: bytes) -> None:
        """Queue `data` and write as much as the kernel accepts."""
        self.tls.send(data)
        self.flush()

    @property
    def wants_write(self) -> bool:
        return bool(self._unsent)

    def flush(self) -> None:
        """Write as much as the kernel accepts; the rest waits until the socket is writable."""
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
        """Send a close_notify if the kernel accepts it, close the socket and delete the keys."""
        with contextlib.suppress(PeerLostError):
            self.tls.close()
            self.flush()
        self.forget()

    def forget(self) -> None:
        """Close the socket and delete the keys without a close_notify: a forked child must not send for its parent."""
        self.socket.close()
        self.tls.forget()

    def _end(self, plain: bytearray, reason: str, cause: OSError | None = None) -> bytes:
        """The stream has ended. Return the data before the end, if any; the next call raises."""
        if plain:
            return bytes(plain)
        raise PeerLostError(reason) from cause


def _context(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> SSL.Context:
    context = SSL.Context(SSL.TLS_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_max_proto_version(SSL.TLS1_3_VERSION)
    context.set_tls13_ciphersuites(b"TLS_AES_256_GCM_SHA384")
    # A resumed session skips the certificates. OpenSSL still sends tickets, but no session is cached.
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    # A peer's signature is verified with the key in its certificate, before the peer is authenticated. An RSA key of its
    # choice would cost twenty times as much CPU time as P-256.
    if _set_signatures(context._context, _SIGNATURES) != 1:
        raise ConfigurationError(f"this machine's OpenSSL does not have {_SIGNATURES.decode()}: {_version()}")
    context.set_options(SSL.OP_NO_TICKET | SSL.OP_NO_COMPRESSION | SSL.OP_NO_RENEGOTIATION)
    context.use_privatekey(key)
    context.use_certificate(certificate)
    context.check_privatekey()
    context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, _accept_single_certificate)
    return context


def _set_groups(context: SSL.Context, hybrid: bool) -> None:
    """Set the key agreement groups explicitly: OpenSSL's defaults depend on a configuration file of the machine."""
    best = (*keys.HYBRID_GROUPS, *keys.CLASSICAL_GROUPS)
    for groups in (best,) if hybrid else (best, keys.CLASSICAL_GROUPS):
        if _set_curves(context._context, ":".join(groups).encode()) == 1:
            return
    raise ConfigurationError(
        f"{_version()} on this machine does not support {' or '.join(keys.HYBRID_GROUPS)}, which the policy requires: "
        "install cryptography from its wheel, which includes an OpenSSL that does, or check what OPENSSL_CONF and "
        'OPENSSL_MODULES load. If that cannot be changed, set key_agreement = "any" in the policy of every worker'
    )


def agreed_here(*, hybrid: bool = True) -> str:
    """Return the key agreement group of a handshake in memory. Raises ConfigurationError or ProtocolError if it fails."""
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
    """Accept any single certificate of the form that workers create; admission authenticates its key. Called before TLS
    uses that key."""
    try:
        if depth != 0 or certificate.get_signature_algorithm() != b"ecdsa-with-SHA256":
            return False
        key = certificate.get_pubkey()
    except (ValueError, crypto.Error):  # an algorithm or key that OpenSSL does not support
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


def _encoded(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _reason(error: SSL.Error) -> str:
    """The reason in OpenSSL's error, without library and function names."""
    stack = error.args[0] if error.args else ()
    return str(stack[-1][2]) if stack and isinstance(stack, list) else str(error) or type(error).__name__
