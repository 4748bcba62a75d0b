"""What a peer can make a worker compute before it is authenticated, as a multiple of one P-256 verification.

Operations are counted (tests/attack/operations.py), so that other work of the machine does not matter. `python -m tests.fuzz
--cpu` measures CPU time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from OpenSSL import SSL, crypto

from ringfence.admission.proofs import certificate, certificate_signature
from ringfence.admission.proofs.certificate import Rules
from ringfence.admission.proofs.certificate_signature import Statement
from ringfence.errors import AdmissionError, ProtocolError
from ringfence.transport import tls
from tests.attack.expensive import CHAINS, chains, large_exponent_key, large_rsa_key
from tests.attack.operations import counted
from tests.certificates import Authority, now
from tests.fuzz import cpu_targets
from tests.fuzz.cpu import search
from tests.fuzz.cpu_targets import TARGETS

# In P-256 verifications. An admitted proof costs about 6, one of an unknown authority about 3.
CERTIFICATE_BUDGET = 20


@pytest.mark.promise("The CPU time that an unauthenticated peer can cause has a budget.")
@pytest.mark.parametrize("name", CHAINS)
def test_untrusted_certificates_cost_few_signature_checks(name: str) -> None:
    """Without the checks before the path is built, a proof of 5 KB costs 0.9 s of CPU time.

    The path builder tries the keys of all issuers, and in every order where they have one name.
    """
    authority = Authority()
    chain = chains(authority.name)[name]
    rules = Rules((authority.der,), ("spiffe://example.org/trainer/*",), "example.org")
    proof, statement = certificate_signature.encode(chain, b"\0" * 70), Statement(b"test", (b"x",))

    with counted() as operations, pytest.raises(AdmissionError):
        certificate.verify(rules, proof, statement, now())
    assert operations.cost() < CERTIFICATE_BUDGET
    assert operations.dear["Certificate.verify_directly_issued_by"] <= 1, "only the authority's key is computed with"
    assert operations.dear["ClientVerifier.verify"] <= (len(chain) == 1)


# -- all that a peer may send ----------------------------------------------------------------------------------------


@pytest.mark.promise("The CPU time that an unauthenticated peer can cause has a budget.")
@pytest.mark.filterwarnings("ignore")  # a serial number of zero
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name == "tls" else name for name in TARGETS]
)
def test_nothing_costs_more_than_its_budget_before_authentication(
    name: str, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expensive inputs, and what a search finds from there; docs/security/fuzzing.md has the figures."""
    target = TARGETS[name]
    seeds = [data[: target.longest] for data in target.seeds()]
    for data in seeds:
        target.cost(data)  # fills caches
    with counted() as operations:
        monkeypatch.setattr(cpu_targets, "clock", operations.cost)
        costs = [target.cost(data)[0] for data in seeds]
        worst, _, tried = search(target, 0.0, least=2000 if full else 30)
    assert max(costs) > 0 and tried >= 30
    for cost, data in zip((*costs, worst.seconds), (*seeds, worst.data), strict=True):
        assert cost < target.budget, f"{cost} P-256 verifications for {data[:2000].hex()}"


# -- TLS ------------------------------------------------------------------------------------------------------------


def client_with(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> SSL.Context:
    """A TLS client that presents a self-signed certificate of this key."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ringfence worker")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 5, tls._NOT_BEFORE, tls._NOT_AFTER)
    context = SSL.Context(SSL.TLS_METHOD)
    context.use_privatekey(key)
    context.use_certificate(builder.sign(key, hashes.SHA256()))
    return context


def shake_hands(client: SSL.Context, credentials: tls.Credentials) -> tuple[int, bool]:
    """How many records of the client the server read, and whether it accepted the client's key."""
    connection, server = SSL.Connection(client, None), tls.Tls(credentials, server=True)
    connection.set_connect_state()
    read = 0
    while not server.established:
        with contextlib.suppress(SSL.WantReadError):
            connection.do_handshake()
        for record in records(connection.bio_read(65536)):
            read += 1
            try:
                server.receive(record)
                if server.established:
                    assert server.peer_key_digest
            except ProtocolError:
                return read, False
        connection.bio_write(server.outgoing())
    return read, True


def records(data: bytes) -> Iterator[bytes]:
    """The TLS records of some bytes; each message of a client's handshake has one of its own."""
    while data:
        length = 5 + int.from_bytes(data[3:5], "big")
        yield data[:length]
        data = data[length:]


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
    usual, accepted = shake_hands(client_with(ec.generate_private_key(ec.SECP256R1())), credentials)
    assert accepted
    theirs, accepted = shake_hands(client_with(key), credentials)
    assert not accepted
    assert theirs <= usual - 2, "refused at the certificate, before its signature and the end of the handshake are read"
