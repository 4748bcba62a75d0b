"""What a peer may send before it is authenticated, with inputs to begin with that are made to be expensive."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from OpenSSL import SSL, crypto

from ringfence import keys
from ringfence.admission.binding import Binding, Role
from ringfence.admission.handshake import State
from ringfence.admission.messages import HANDSHAKE, MessageSplitter, Proof, encode
from ringfence.admission.policy import Admitted, Evidence, Policy, Prover, verdict
from ringfence.admission.proofs import (
    azure,
    bundle,
    certificate_signature,
    hcl_report,
    nvidia,
    snp,
    tdx_quote,
    token,
)
from ringfence.errors import ProtocolError
from ringfence.transport import tls
from tests.attack import hostile
from tests.attack.expensive import chains, large_exponent_key, many_names
from tests.certificates import Authority
from tests.unit import token_mint
from tests.unit.admission_samples import channels, worker

BINDING = Binding(b"a binding")
clock: Callable[[], float] = time.thread_time  # tests count operations instead (tests/attack/operations.py)


@dataclass(frozen=True)
class CpuTarget:
    """`cost`: the CPU seconds that any bytes take, and how many bytes these are on the wire. Bytes that are admitted count for
    nothing: an attacker does not have them."""

    name: str
    seeds: Callable[[], list[bytes]]
    cost: Callable[[bytes], tuple[float, int]]
    longest: int = keys.PROOF_LIMIT_BYTES
    budget: int = 20  # P-256 verifications that the dearest input may cost; tests/attack/test_costs.py holds it


@cache
def _kind(name: str) -> hostile.Kind:
    return hostile.KINDS[name]()


@cache
def _admission(name: str) -> tuple[Policy, Prover]:
    return _kind(name).admission(1)


def _proof(name: str, budget: int, more: Callable[[], list[bytes]] = list, longest: int = 0) -> CpuTarget:
    def cost(data: bytes) -> tuple[float, int]:
        policy, prover = _admission(name)
        evidence = Evidence(worker(1).entry, prover.kind, data, BINDING)
        before = clock()
        found = verdict(policy, evidence)
        spent = clock() - before
        return 0.0 if isinstance(found, Admitted) else spent, len(data)

    def seeds() -> list[bytes]:
        found = [_kind(name).hostile(BINDING), *more()]
        if name != "nvidia":  # all but the last of several GPUs sign only for who has them
            found.append(_admission(name)[1].prove(BINDING))
        return found

    return CpuTarget(name, seeds, cost, longest or keys.PROOF_LIMIT_BYTES, budget)


# -- proofs ---------------------------------------------------------------------------------------------------------


def _chains() -> list[bytes]:
    return [certificate_signature.encode(each, bytes(70)) for each in chains("test authority").values()]


def _rsa_certificate() -> bytes:
    """Self-signed, with an exponent as long as its modulus."""
    return Authority("Intel SGX PCK Platform CA", key=large_exponent_key()).der


def _quotes() -> list[bytes]:
    """Certificates of the sender's own in place of Intel's: many, large, with keys that cost."""
    genuine = _kind("tdx").hostile(BINDING)
    start = genuine.index(b"-----BEGIN CERTIFICATE")
    wide = x509.load_der_x509_certificate(many_names("Intel SGX PCK Platform CA")[0])
    own = [x509.load_der_x509_certificate(_rsa_certificate()), wide]
    found = []
    for parts in (own[:1] * 6, own[1:] * 2, own):
        made = b"".join(each.public_bytes(Encoding.PEM) for each in parts)
        found += [_with_chain(genuine, start, chain) for chain in (made, genuine[start:] + made)]
    return [each for each in found if len(each) <= tdx_quote.QUOTE_BYTES]


def _with_chain(quote: bytes, start: int, chain: bytes) -> bytes:
    """A quote with another chain, all its lengths set right."""
    added = len(chain) - (len(quote) - start)
    data = bytearray(quote[:start])
    outer = data.index((6).to_bytes(2, "little"), 636 + 128) + 2
    for place in (start - 4, outer, 632):
        length = int.from_bytes(data[place : place + 4], "little") + added
        data[place : place + 4] = length.to_bytes(4, "little")
    return bytes(data) + chain


def _endorsements() -> list[bytes]:
    report, leaf = snp.decode(_kind("snp").hostile(BINDING))
    return [
        snp.encode(report, each) for each in (leaf[:-1], b"\x30\x82\x0f\xfc" + b"\x30\0" * 2046, _rsa_certificate())
    ]


def _vtpms() -> list[bytes]:
    """Endorsements as above, and runtime data that takes long to read."""
    report, leaf, attestation = azure.decode_snp(_kind("azure_snp").hostile(BINDING))
    limit = hcl_report.RUNTIME_BYTES
    slow = (
        b"[" * (limit // 2) + b"]" * (limit // 2),
        b"[" + b"1e9," * (limit // 4 - 1) + b"1]",
        b'"' + b"\\u0041" * 1350 + b'"',
    )
    numbers = b"[" + b",".join([b"9" * 4000] * 2) + b"]"
    found = [azure.encode_snp(report, leaf, replace(attestation, runtime_data=each)) for each in (*slow, numbers)]
    return found + [azure.encode_snp(report, each, attestation) for each in (leaf[:-1], _rsa_certificate())]


def _vtpm_quotes() -> list[bytes]:
    """Chains of the sender's own below a quote, with its own vTPM."""
    quote, attestation = azure.decode_tdx(_kind("azure_tdx").hostile(BINDING))
    start = quote.index(b"-----BEGIN CERTIFICATE")
    own = x509.load_der_x509_certificate(_rsa_certificate()).public_bytes(Encoding.PEM)
    made = (_with_chain(quote, start, chain) for chain in (own * 6, quote[start:] + own))
    return [azure.encode_tdx(each, attestation) for each in made if len(each) <= tdx_quote.QUOTE_BYTES]


def _gpus() -> list[bytes]:
    """Sixteen GPUs with chains of the sender's own, and one whose report is as long as can be."""
    recorded = nvidia.decode(_kind("nvidia").hostile(BINDING))
    weird = _rsa_certificate()
    found = [nvidia.encode([nvidia.Gpu(recorded[0].report, (recorded[0].chain[0], *[weird] * 5))] * 16)]
    found.append(nvidia.encode([recorded[0]] * 16))
    found.append(nvidia.encode([nvidia.Gpu(each.report, each.chain[:1] * 6) for each in recorded]))
    question, rest = recorded[0].report[:37], recorded[0].report[37:]
    fields = b"".join(number.to_bytes(2, "little") + b"\0\0" for number in range(1900))
    end = 8 + int.from_bytes(rest[5:8], "little") + 32
    long = question + rest[:end] + len(fields).to_bytes(2, "little") + fields + rest[-96:]
    return [*found, nvidia.encode([nvidia.Gpu(long, recorded[0].chain)])]


def _tokens() -> list[bytes]:
    """Headers that take long to read, up to what may be read of them; claims that are never read."""
    heads = [
        b'{"alg":"ES384","kid":"p384","x":' + inner + b"}"
        for inner in (
            b"[" * 2900 + b"]" * 2900,
            b"[" + b",".join([b"9" * 4000]) + b"]",
            b"[" + b",".join([b"1e9"] * 1400) + b"]",
            b'{"' + b'":0,"'.join(str(each).encode() for each in range(700)) + b'":0}',
            b"0." + b"1" * 5900,
            b'"' + b"\\u0041" * 950 + b'"',
        )
    ]
    body, signature = token_mint.text(b"[" * 60_000), token_mint.text(bytes([1]) * 96)
    found = [token.encode(f"{token_mint.text(head)}.{token_mint.text(b'{}')}.{signature}", {}) for head in heads]
    plain = token_mint.text(b'{"alg":"ES384","kid":"p384"}')
    good = f"{plain}.{body}.{signature}"
    short = f"{token_mint.text(heads[0])}.e30.{signature}"
    return [*found, token.encode(good, {}), token.encode(short, {f"s{place}": "a.b.c" for place in range(64)})]


def _bundles() -> list[bytes]:
    certified = _admission("combined")[1].prove(BINDING)
    parts = dict(bundle.decode(certified, keys.PROOF_LIMIT_BYTES))
    return [bundle.encode([(2, parts[2]), (3, each)]) for each in [*_quotes(), bytes(90_000)]]


# -- before the proof -----------------------------------------------------------------------------------------------


def _converse(data: bytes) -> tuple[float, int]:
    """Frames of a child that is not admitted, as its parent receives them."""
    handshake = worker(0).handshake(Role.PARENT)
    handshake.begin(channels(worker(1), worker(0))[1])
    frames = MessageSplitter(HANDSHAKE, keys.ADMISSION_BYTES)
    before = clock()
    with contextlib.suppress(ProtocolError):
        frames.feed(data)
        while handshake.state is not State.REFUSED and (message := frames.next()) is not None:
            handshake.receive(message)
    return clock() - before, len(data)


def _frames() -> list[bytes]:
    hello = worker(1).hello
    said = [encode(hello), encode(hello) + encode(Proof(1, bytes(keys.PROOF_LIMIT_BYTES)))]
    return [*said, b"\1\0\1\xff\xff" + bytes(131_071), encode(hello)[:-1]]


@cache
def _server() -> tls.Credentials:
    return tls.Credentials()


@cache
def _client_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


class Server:
    """The worker's end, which counts what it costs. It stops where the loop of a join would."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.received = 0
        self.tls = tls.Tls(_server(), server=True)

    def receive(self, data: bytes) -> None:
        limit = keys.ADMISSION_BYTES if self.tls.established else keys.TLS_HANDSHAKE_BYTES
        data = data[: limit - self.received]
        self.received += len(data)
        if not data:
            raise ProtocolError("too much")
        before = clock()
        try:
            self.tls.receive(data)
            if self.tls.established:
                assert self.tls.peer_key_digest
        finally:
            self.seconds += clock() - before


def _flights(data: bytes) -> tuple[float, int]:
    """The first byte says what the input is: 0 what a client sends first, 1 the certificate that it shows, 2 how many bytes
    of its data are in each record."""
    server = Server()
    with contextlib.suppress(ProtocolError, SSL.Error, crypto.Error):
        if data[:1] == b"\0":
            server.receive(data[1:])
            return server.seconds, server.received
        context = SSL.Context(SSL.TLS_METHOD)
        context.use_privatekey(_client_key())
        shown = data[1:] if data[:1] == b"\1" else tls._self_signed(_client_key()).public_bytes(Encoding.DER)
        context.use_certificate(crypto.load_certificate(crypto.FILETYPE_ASN1, shown))
        client = SSL.Connection(context, None)
        client.set_connect_state()
        _connect(client, server)
        for size in data[1:] if data[:1] == b"\2" else b"":
            client.send(bytes(size or 1))
        server.receive(client.bio_read(keys.ADMISSION_BYTES))
    return server.seconds, server.received


def _connect(client: SSL.Connection, server: Server) -> None:
    while not server.tls.established:
        with contextlib.suppress(SSL.WantReadError):
            client.do_handshake()
        server.receive(client.bio_read(65536))
        if outgoing := server.tls.outgoing():
            client.bio_write(outgoing)


def _certificate(*extensions: x509.ExtensionType) -> bytes:
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "x")])
    start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    builder = x509.CertificateBuilder(
        name, name, _client_key().public_key(), 5, start, start + 9999 * datetime.timedelta(1)
    )
    for each in extensions:
        builder = builder.add_extension(each, critical=False)
    return builder.sign(_client_key(), hashes.SHA256()).public_bytes(Encoding.DER)


def _handshakes() -> list[bytes]:
    client = SSL.Connection(SSL.Context(SSL.TLS_METHOD), None)
    client.set_connect_state()
    with contextlib.suppress(SSL.WantReadError):
        client.do_handshake()
    many = [x509.UnrecognizedExtension(x509.ObjectIdentifier(f"1.2.{place}"), b"") for place in range(3, 400)]
    names = x509.SubjectAlternativeName([x509.DNSName("a")] * 1500)
    constraints = x509.NameConstraints([x509.DNSName("a")] * 400, None)
    shown = [_certificate(), _certificate(*many), _certificate(names), _certificate(names, constraints)]
    return [
        b"\0" + client.bio_read(65536),
        *(b"\1" + each for each in shown),
        b"\2" + bytes(5000),
        b"\2" + b"\xff" * 400,
    ]


TARGETS = {
    each.name: each
    for each in (
        _proof("secret", 5),
        _proof("certificate", 20, _chains, 20_000),
        _proof("tdx", 40, _quotes, tdx_quote.QUOTE_BYTES),
        _proof("snp", 30, _endorsements, 6_000),
        _proof("azure_snp", 40, _vtpms, 20_000),
        _proof("azure_tdx", 50, _vtpm_quotes, 30_000),
        _proof("nvidia", 50, _gpus),
        _proof("token", 40, _tokens),
        _proof("combined", 60, _bundles),
        CpuTarget("handshake", _frames, _converse, keys.ADMISSION_BYTES, 20),
        CpuTarget("tls", _handshakes, _flights, keys.TLS_HANDSHAKE_BYTES, 40),
    )
}
