"""What a peer can make a worker compute before it is authenticated, as a multiple of one P-256 verification."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from OpenSSL import SSL, crypto

from ringfence.admission.proofs import certificate
from ringfence.admission.proofs.certificate import Rules, Statement
from ringfence.errors import AdmissionError, ProtocolError
from ringfence.transport import tls
from tests.attack.expensive import CHAINS, chains, cpu_seconds, large_exponent_key, large_rsa_key, reference_seconds
from tests.certificates import Authority, now
from tests.fuzz.cpu import measured, search
from tests.fuzz.cpu_targets import TARGETS

# In P-256 verifications. An admitted proof costs about 6, one of an unknown authority about 3.
CERTIFICATE_BUDGET = 20
TLS_BUDGET = 3  # times an ordinary handshake


@pytest.mark.promise("The CPU time that an unauthenticated peer can cause has a budget.")
@pytest.mark.parametrize("name", CHAINS)
def test_untrusted_certificates_cost_few_signature_checks(name: str) -> None:
    """Without the checks before the path is built, a proof of 5 KB costs 0.9 s of CPU time."""
    authority = Authority()
    chain = chains(authority.name)[name]
    rules = Rules((authority.der,), ("spiffe://example.org/trainer/*",), "example.org")
    proof, statement = certificate.encode(chain, b"\0" * 70), Statement(b"test", (b"x",))

    def verify() -> None:
        with pytest.raises(AdmissionError):
            certificate.verify(rules, proof, statement, now())

    assert cpu_seconds(verify, 3) < CERTIFICATE_BUDGET * reference_seconds()


# -- all that a peer may send ----------------------------------------------------------------------------------------


@pytest.mark.promise("The CPU time that an unauthenticated peer can cause has a budget.")
@pytest.mark.filterwarnings("ignore")  # a serial number of zero
@pytest.mark.parametrize("name", TARGETS)
def test_nothing_costs_more_than_its_budget_before_authentication(name: str, full: bool) -> None:
    """Expensive inputs, and what a search finds from there; docs/security/fuzzing.md has the figures."""
    target = TARGETS[name]
    for data in target.seeds():
        target.cost(data)  # fills caches
        found = measured(target, data[: target.longest], 5)
        assert found.seconds < target.budget * reference_seconds(), f"{found.seconds} s for {data[:200].hex()}"
    worst, _, tried = search(target, 60.0 if full else 1.0)
    assert tried > 10
    worst = measured(target, worst.data, 20)  # and the reference again: a shared processor changes its speed
    reference_seconds.cache_clear()
    assert worst.seconds < target.budget * reference_seconds(), f"{worst.seconds} s for {worst.data.hex()[:4000]}"


# -- TLS ------------------------------------------------------------------------------------------------------------


def client_with(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> SSL.Context:
    """A TLS client that presents a self-signed certificate of this key."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ringfence worker")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 5, tls._NOT_BEFORE, tls._NOT_AFTER)
    context = SSL.Context(SSL.TLS_METHOD)
    context.use_privatekey(key)
    context.use_certificate(builder.sign(key, hashes.SHA256()))
    return context


def shake_hands(client: SSL.Context, credentials: tls.Credentials) -> tuple[float, bool]:
    """CPU seconds that the server's side took, and whether it accepted the client's key."""
    connection, server = SSL.Connection(client, None), tls.Tls(credentials, server=True)
    connection.set_connect_state()
    spent = 0.0
    while not server.established:
        with contextlib.suppress(SSL.WantReadError):
            connection.do_handshake()
        data = connection.bio_read(65536)
        before = time.thread_time()
        try:
            server.receive(data)
            if server.established:
                assert server.peer_key_digest
        except ProtocolError:
            return spent + time.thread_time() - before, False
        spent += time.thread_time() - before
        connection.bio_write(server.outgoing())
    return spent, True


@pytest.mark.parametrize("place", [0, 1], ids=["algorithm", "curve"])
def test_a_certificate_with_an_unknown_algorithm_is_refused(place: int) -> None:
    """The search for CPU time found it: an exception in the callback would end the join."""
    key = ec.generate_private_key(ec.SECP256R1())
    encoded = tls._self_signed(key).public_bytes(Encoding.DER)
    known, unknown = [
        (bytes.fromhex("2a8648ce3d040302"), bytes.fromhex("2a8648ce3d04037f")),
        (bytes.fromhex("2a8648ce3d030107"), bytes.fromhex("2a8648ce3d03017f")),
    ][place]
    odd = crypto.load_certificate(crypto.FILETYPE_ASN1, encoded.replace(known, unknown))
    for depth in (0, 1):
        assert not tls._accept_single_certificate(None, odd, 18, depth, 0)  # type: ignore[arg-type]
    context = SSL.Context(SSL.TLS_METHOD)
    context.use_privatekey(key)
    if place == 0:  # OpenSSL does not send a certificate with an unknown curve
        context.use_certificate(odd)
        assert not shake_hands(context, tls.Credentials())[1]


KEYS: dict[str, Callable[[], Any]] = {
    "RSA with a large exponent": large_exponent_key,
    "RSA-4096": large_rsa_key,
    "P-521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "brainpool": lambda: ec.generate_private_key(ec.BrainpoolP256R1()),
    "secp256k1": lambda: ec.generate_private_key(ec.SECP256K1()),
}


@pytest.mark.promise("The CPU time that an unauthenticated peer can cause has a budget.")
@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("offered", [tls._SIGNATURES, b"ECDSA+SHA256:ECDSA+SHA512:RSA-PSS+SHA256"], ids=["one", "many"])
def test_tls_computes_with_no_key_but_p256(name: str, offered: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the key holds for a peer that ignores the signature algorithms that this worker offers."""
    monkeypatch.setattr(tls, "_SIGNATURES", offered)
    credentials, key = tls.Credentials(), KEYS[name]()
    ours = client_with(ec.generate_private_key(ec.SECP256R1()))
    usual, theirs = ([shake_hands(client, credentials) for _ in range(5)] for client in (ours, client_with(key)))
    assert all(accepted for _, accepted in usual)
    assert not any(accepted for _, accepted in theirs)
    assert min(theirs)[0] < TLS_BUDGET * min(usual)[0]
