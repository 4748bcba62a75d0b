"""The verifier of certificates: each thing that must be refused, refused for its own reason, and the good ones admitted."""

from __future__ import annotations

import base64
import bisect
import datetime
import errno
import json
import re
from dataclasses import replace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ringfence import keys
from ringfence.admission.entry import ENDORSEMENT_BYTES, Listing
from ringfence.admission.policy import Policy, verify
from ringfence.admission.policy_file.toml_table import parse
from ringfence.admission.proofs import certificate, certificate_signature, identity
from ringfence.admission.proofs.certificate import CertificateProver, CertificateVerifier, Credential, Rules
from ringfence.admission.proofs.certificate_signature import Statement
from ringfence.errors import AdmissionError, PolicyError, ProtocolError
from tests.certificates import HOUR, NOW, ODD_FEATURE, Authority, key_usage, now, private_pem, spiffe
from tests.unit.admission_samples import worker

AUTHORITY = Authority()
RULES = Rules((AUTHORITY.der,), ("spiffe://example.org/trainer/*",), "example.org")
PLAIN = Rules((AUTHORITY.der,), ("*.nodes.example.org", "https://example.org/w/**"))
STATEMENT = Statement(b"test", (b"what the worker signs",))
URI = x509.UniformResourceIdentifier
DNS = x509.DNSName


def shown(credential: Credential, statement: Statement = STATEMENT) -> bytes:
    return certificate.sign_statement(credential, statement)


def refusal(rules: Rules, credential: Credential, at: float | None = None) -> str:
    with pytest.raises(AdmissionError) as caught:
        certificate.verify(rules, shown(credential), STATEMENT, now() if at is None else at)
    return str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        ec.generate_private_key(ec.SECP256R1()),
        ec.generate_private_key(ec.SECP384R1()),
        ec.generate_private_key(ec.SECP521R1()),
        ed25519.Ed25519PrivateKey.generate(),
        rsa.generate_private_key(65537, 2048),
    ],
    ids=["P-256", "P-384", "P-521", "Ed25519", "RSA-2048"],
)
def test_a_good_certificate_is_admitted_and_named(key: certificate_signature.PrivateKey) -> None:
    credential = AUTHORITY.issue(spiffe("trainer/7"), key=key)
    claims = certificate.verify(RULES, shown(credential), STATEMENT, now())
    assert claims.id == "spiffe://example.org/trainer/7"
    assert len(shown(credential)) < ENDORSEMENT_BYTES


def test_an_intermediate_is_accepted_if_it_is_presented() -> None:
    between = Authority("between", issuer=AUTHORITY)
    credential = between.issue(spiffe("trainer/7"))
    assert certificate.verify(RULES, shown(credential), STATEMENT, now()).id == "spiffe://example.org/trainer/7"
    assert "not issued under an authority of the policy" in refusal(
        RULES, replace(credential, chain=credential.chain[:1])
    )


def test_both_purposes_or_none() -> None:
    client, server = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
    both = AUTHORITY.issue(spiffe("trainer/7"), purposes=[client, server])
    assert certificate.verify(RULES, shown(both), STATEMENT, now())
    for purposes in ([client], [server], [ExtendedKeyUsageOID.CODE_SIGNING]):
        assert "clientAuth and serverAuth" in refusal(RULES, AUTHORITY.issue(spiffe("trainer/7"), purposes=purposes))


@pytest.mark.promise("A certificate with an ambiguous identity or a foreign trust domain is rejected.")
@pytest.mark.parametrize(
    ("names", "says"),
    [
        ((), "no subject alternative name"),
        ((DNS("trainer.example.org"),), "no URI"),
        ((spiffe("trainer/7"), spiffe("trainer/8")), "2 URIs, and exactly one is allowed"),
        ((spiffe("trainer/7"), URI("https://example.org/")), "2 URIs"),
        ((spiffe("trainer/7", "example.com"),), "trust domain example.com, and this rule is for example.org"),
        ((spiffe("trainer/7", "sub.example.org"),), "trust domain sub.example.org"),
        ((spiffe("trainer/7", "EXAMPLE.ORG"),), "not a SPIFFE identity"),
        ((spiffe("trainer/7", "example.org:8443"),), "not a SPIFFE identity"),
        ((spiffe("trainer/7", "me@example.org"),), "not a SPIFFE identity"),
        ((URI("spiffe://example.org"),), "not a SPIFFE identity"),
        ((URI("spiffe://example.org/"),), "not a SPIFFE identity"),
        ((URI("SPIFFE://example.org/trainer/7"),), "not a SPIFFE identity"),
        ((URI("https://example.org/trainer/7"),), "not a SPIFFE identity"),
        ((spiffe("trainer/"),), "not a SPIFFE identity"),
        ((spiffe("trainer//7"),), "not a SPIFFE identity"),
        ((spiffe("trainer/.."),), "not a SPIFFE identity"),
        ((spiffe("trainer/7?x=1"),), "not a SPIFFE identity"),
        ((spiffe("trainer/7#x"),), "not a SPIFFE identity"),
        ((spiffe("trainer/%37"),), "not a SPIFFE identity"),
        ((spiffe("trainer/*"),), "not a SPIFFE identity"),
        ((spiffe("t" * 2048),), "not a SPIFFE identity"),
        ((spiffe("trainer/7/8"),), "the policy admits spiffe://example.org/trainer/*"),
        ((spiffe("trainer"),), "the policy admits"),
        ((spiffe("viewer/7"),), "the policy admits"),
        ((spiffe("evil/trainer/7"),), "the policy admits"),
    ],
)
def test_names_that_are_refused(names: tuple[x509.GeneralName, ...], says: str) -> None:
    assert says in refusal(RULES, AUTHORITY.issue(*names))


@pytest.mark.parametrize(
    ("names", "admitted"),
    [
        ((DNS("a.nodes.example.org"),), True),
        ((DNS("A.Nodes.example.org"),), True),
        ((DNS("a.b.nodes.example.org"),), False),
        ((DNS("nodes.example.org"),), False),
        ((DNS("*.nodes.example.org"),), False),
        ((DNS("a.nodes.example.org"), DNS("b.nodes.example.org")), False),
        ((URI("https://example.org/w/a/b"),), True),
        ((URI("https://example.org/w/"),), False),
        ((URI("https://example.org/v"), DNS("a.nodes.example.org")), False),
        ((x509.RFC822Name("a.nodes.example.org"),), False),
        ((spiffe("trainer/7"),), False),
        ((spiffe("x.nodes.example.org"),), False),
        ((URI("https://evil.example/a.nodes.example.org"),), False),
        ((URI("a.nodes.example.org"),), False),
        ((URI("urn:a.nodes.example.org"),), False),
        ((DNS("a:b.nodes.example.org"),), False),
        ((DNS("a/b.nodes.example.org"),), False),
        ((DNS("a b.nodes.example.org"),), False),
        ((DNS("https://example.org/w/a"),), False),
        ((URI("https://example.org/w/../admin"),), False),
        ((URI("https://example.org/w/./a"),), False),
        ((URI("https://example.org/w//a"),), False),
        ((URI("https://example.org/w/a/"),), False),
        ((URI("https://example.org/w/%2e%2e/admin"),), False),
        ((URI("https://example.org/w/a?b"),), False),
        ((URI("https://example.org/w/a#b"),), False),
        ((URI("https://evil.example?/example.org/w/a"),), False),
    ],
)
def test_names_without_a_trust_domain(names: tuple[x509.GeneralName, ...], admitted: bool) -> None:
    credential = AUTHORITY.issue(*names)
    if admitted:
        assert certificate.verify(PLAIN, shown(credential), STATEMENT, now())
    else:
        assert "certificate" in refusal(PLAIN, credential)


@pytest.mark.promise("A certificate with an ambiguous identity or a foreign trust domain is rejected.")
def test_beside_a_uri_no_other_name_counts() -> None:
    uri, hosts = URI("https://example.org/w/a/b"), (DNS("a.nodes.example.org"), DNS("b.nodes.example.org"))
    credential = AUTHORITY.issue(uri, *hosts, x509.RFC822Name("a@example.org"))
    assert certificate.verify(PLAIN, shown(credential), STATEMENT, now()).id == uri.value
    for name in (*(host.value for host in hosts), "*.nodes.example.org", "a@example.org"):
        assert "the policy admits" in refusal(replace(PLAIN, ids=(name,)), credential)
    named = AUTHORITY.issue(spiffe("trainer/7"), *hosts)
    assert certificate.verify(RULES, shown(named), STATEMENT, now()).id == "spiffe://example.org/trainer/7"


def test_a_pattern_for_hosts_is_none_for_uris() -> None:
    """A star for one label must not match a whole URI, which the same authority may issue to any worker."""
    rules = replace(PLAIN, ids=("*", "*.example.org"))
    assert certificate.verify(rules, shown(AUTHORITY.issue(DNS("node"))), STATEMENT, now())
    for name in (URI("https://evil/any/path"), URI("https://evil/x.example.org")):
        assert "the policy admits" in refusal(rules, AUTHORITY.issue(name))
    assert "no trust_domain" in refusal(rules, AUTHORITY.issue(spiffe("trainer/7")))


@pytest.mark.promise("Expired certificates, collateral and tokens are rejected at admission.")
def test_a_certificate_counts_from_its_first_second_to_its_last() -> None:
    credential = AUTHORITY.issue(spiffe("trainer/7"))
    first, last = (NOW - HOUR).timestamp(), (NOW + HOUR).timestamp()
    for moment in (first, last):
        assert certificate.verify(RULES, shown(credential), STATEMENT, moment)
    assert "expired at 2030-06-01 13:00:00 UTC: renew it" in refusal(RULES, credential, last + 1)
    assert "valid from 2030-06-01 11:00:00 UTC" in refusal(RULES, credential, first - 1)


def test_an_expired_authority_admits_no_worker() -> None:
    old = Authority(start=NOW - 48 * HOUR, end=NOW - HOUR)
    rules = replace(RULES, authorities=(old.der,))
    assert "not issued under an authority of the policy" in refusal(rules, old.issue(spiffe("trainer/7")))


@pytest.mark.parametrize(
    ("usage", "says"),
    [
        (None, "has no key usage"),
        (key_usage("key_agreement"), "must have digitalSignature"),
        (key_usage("digital_signature", "key_cert_sign"), "neither keyCertSign"),
        (key_usage("digital_signature", "crl_sign"), "nor cRLSign"),
    ],
)
def test_a_key_usage_that_is_not_a_workers_is_refused(usage: x509.KeyUsage | None, says: str) -> None:
    assert says in refusal(RULES, AUTHORITY.issue(spiffe("trainer/7"), usage=usage))


def test_an_authority_is_not_admitted_as_a_worker() -> None:
    credential = AUTHORITY.issue(spiffe("trainer/7"), ca=True)
    assert "not issued under an authority of the policy" in refusal(RULES, credential)


def test_a_worker_cannot_issue_certificates() -> None:
    """A chain whose middle is a worker's certificate: the oldest mistake of all."""
    mate = AUTHORITY.issue(spiffe("trainer/1"))
    forger = Authority("worker", key=mate.key)
    credential = forger.issue(spiffe("trainer/7"))
    forged = Credential((*credential.chain, mate.chain[0]), credential.key)
    assert "not issued under an authority of the policy" in refusal(RULES, forged)


def test_another_authority_of_the_same_name_is_refused() -> None:
    unauthenticated_peer = Authority()
    credential = unauthenticated_peer.issue(spiffe("trainer/7"))
    for chain in (credential.chain, (*credential.chain, unauthenticated_peer.der), (*credential.chain, AUTHORITY.der)):
        assert "not issued under an authority of the policy" in refusal(RULES, replace(credential, chain=chain))


def test_text_of_an_unauthenticated_peer_is_escaped_in_logs() -> None:
    unauthenticated_peer = Authority("end of line\r\nrank 0: admitted \x1b[2J")
    leaf = unauthenticated_peer.sign("worker\nrank 0: admitted", unauthenticated_peer.key, [spiffe("trainer/7")])
    credential = Credential((leaf.public_bytes(Encoding.DER), unauthenticated_peer.der), unauthenticated_peer.key)
    assert refusal(RULES, credential).isprintable()


@pytest.mark.parametrize(
    "key", [ec.generate_private_key(ec.SECP256K1()), rsa.generate_private_key(65537, 1024)], ids=["k1", "RSA-1024"]
)
def test_weak_or_odd_keys_are_refused(key: certificate_signature.PrivateKey) -> None:
    credential = AUTHORITY.issue(spiffe("trainer/7"), key=key)
    forged = certificate_signature.encode(credential.chain, b"never looked at")
    with pytest.raises(AdmissionError, match="is not P-256, P-384, P-521, Ed25519 or RSA from 2048"):
        certificate.verify(RULES, forged, STATEMENT, now())


def test_the_key_must_be_the_certificates_and_the_message_this_one() -> None:
    credential = AUTHORITY.issue(spiffe("trainer/7"))
    other = replace(credential, key=ec.generate_private_key(ec.SECP256R1()))
    assert "made for another connection, or with another key" in refusal(RULES, other)
    with pytest.raises(AdmissionError, match="made for another connection"):
        certificate.verify(RULES, shown(credential, Statement(b"test", (b"something else",))), STATEMENT, now())


@pytest.mark.promise("Signed evidence with a flipped bit is rejected.")
@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_every_flipped_bit_of_a_proof_is_refused() -> None:
    """Also those that no signature of an authority covers, such as the count of unused bits before that signature."""
    credential = AUTHORITY.issue(spiffe("trainer/7"), key=ed25519.Ed25519PrivateKey.generate())
    proof = shown(credential)
    for at in range(len(proof)):
        for bit in range(8):
            flipped = bytearray(proof)
            flipped[at] ^= 1 << bit
            with pytest.raises(AdmissionError):
                certificate.verify(RULES, bytes(flipped), STATEMENT, now())


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused_with_an_admission_error(data: bytes) -> None:
    with pytest.raises(AdmissionError):
        certificate.verify(RULES, data, STATEMENT, now())


@settings(deadline=None)
@given(st.lists(st.binary(max_size=50), min_size=1, max_size=4).map(tuple), st.binary(max_size=80))
def test_what_is_encoded_comes_back(chain: tuple[bytes, ...], signature: bytes) -> None:
    assert certificate_signature.decode(certificate_signature.encode(chain, signature)) == (chain, signature)
    with pytest.raises(ProtocolError):
        certificate_signature.decode(certificate_signature.encode(chain, signature) + b"\0")


@pytest.mark.parametrize("count", [0, 5])
def test_the_number_of_certificates_is_bounded(count: int) -> None:
    with pytest.raises(ProtocolError, match="1 to 4 are allowed"):
        certificate_signature.decode(certificate_signature.encode((b"x",) * count, b""))


# -- listings -------------------------------------------------------------------------------------------------------


def listing(credential: Credential, rank: int = 1) -> Listing:
    entry = worker(rank).entry
    return Listing(entry, 2, bytes(32), CertificateProver(credential).endorse(entry, bytes(32)))


def test_a_listing_is_endorsed_by_its_own_certificate_and_for_itself_only() -> None:
    good = listing(AUTHORITY.issue(spiffe("trainer/7")))
    policy = Policy((CertificateVerifier(RULES, now),))
    assert verify(policy, good).proof_name == "certificate"
    for bad in (
        replace(good, entry=replace(good.entry, public_key=bytes(32))),
        replace(good, entry=replace(good.entry, rank=2)),
        replace(good, proof_digest=b"\1" * 32),
        replace(good, endorsement=b""),
        listing(AUTHORITY.issue(spiffe("viewer/7"))),
        listing(Authority().issue(spiffe("trainer/7"))),
    ):
        with pytest.raises(AdmissionError, match=f"rank {bad.entry.rank}: "):
            verify(policy, bad)


def test_a_verified_listing_is_not_verified_again() -> None:
    asked: list[float] = []

    def clock() -> float:
        asked.append(now())
        return now()

    policy = Policy((CertificateVerifier(RULES, clock),))
    good = listing(AUTHORITY.issue(spiffe("trainer/7")))
    for _ in range(3):
        verify(policy, good)
    assert len(asked) == 1
    with pytest.raises(AdmissionError):
        verify(policy, replace(good, proof_digest=b"\1" * 32))


def test_an_endorsement_or_a_tls_signature_is_not_a_proof() -> None:
    credential = AUTHORITY.issue(spiffe("trainer/7"))
    entry = worker(1).entry
    proof = Statement(keys.CERTIFICATE_PROOF, (entry.encode(), bytes(32)))
    endorsement = Statement.endorsement(entry, bytes(32))
    with pytest.raises(AdmissionError, match="made for another connection"):
        certificate.verify(RULES, certificate.sign_statement(credential, endorsement), proof, now())
    message = proof.message(credential.chain)
    assert message[:64] == b" " * 64, "more than the 32 bytes that a peer chooses of what TLS 1.2 signs"
    assert not message[64:].startswith(b"TLS 1.3, ")


# -- the table ------------------------------------------------------------------------------------------------------


def read(text: str, **files: bytes) -> Rules:
    def fetch(path: str, limit: int) -> bytes:
        if path not in files:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return files[path][:limit]

    return certificate.read_rules(parse(text.encode(), fetch))


def bundle(*certificates: bytes, use: str = "x509-svid") -> bytes:
    found = [{"use": use, "kty": "EC", "x5c": [base64.b64encode(each).decode()]} for each in certificates]
    return json.dumps({"spiffe_sequence": 1, "keys": found}).encode()


def test_a_table_is_resolved_to_what_its_files_hold() -> None:
    second = Authority("second")
    text = 'ca = ["one", "two"]\ntrust_domain = "example.org"\nids = "spiffe://example.org/trainer/*"'
    rules = read(text, one=AUTHORITY.pem, two=second.pem)
    assert set(rules.authorities) == {AUTHORITY.der, second.der}
    swapped = read(text.replace('"one", "two"', '"two", "one"'), one=AUTHORITY.pem, two=second.pem)
    assert swapped.content() == rules.content(), "neither names nor the order of files matter"
    assert read(text, one=AUTHORITY.pem, two=Authority().pem).content() != rules.content()
    joined = read(text.replace('["one", "two"]', '"one"'), one=AUTHORITY.pem + second.pem)
    assert joined.content() == rules.content()
    explained = "\n".join(rules.explain())
    assert "a SPIFFE identity of example.org named spiffe://example.org/trainer/*" in explained
    assert "'CN=test authority' until 2030-06-02, SHA-256 " in explained


def test_a_trust_bundle_is_read_without_keys_for_other_uses() -> None:
    text = 'ca = "b"\ntrust_domain = "example.org"\nids = "spiffe://example.org/**"'
    der = AUTHORITY.der
    rules = read(text, b=bundle(der))
    assert rules.authorities == (der,)
    mixed = json.loads(bundle(der))
    mixed["keys"].append({"use": "jwt-svid", "kty": "EC", "kid": "x"})
    assert read(text, b=json.dumps(mixed).encode()).authorities == (der,)


TEXT = 'ca = "b"\ntrust_domain = "example.org"\nids = "spiffe://example.org/**"'
ODD = AUTHORITY.sign("odd", AUTHORITY.key, (), ca=True, extra=[ODD_FEATURE])
LEAF = AUTHORITY.issue(spiffe("trainer/1")).chain[0]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a PEM file with certificates"),
        (AUTHORITY.pem + b"-----BEGIN PRIVATE KEY-----\n", "certificates \\(BEGIN CERTIFICATE\\) only"),
        (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "cannot be read"),
        (x509.load_der_x509_certificate(LEAF).public_bytes(Encoding.PEM), "is not a CA"),
        (b"{", "not a SPIFFE trust bundle"),
        (b'{"keys": 1}', "not a SPIFFE trust bundle"),
        (b'{"keys": [], "keys": []}', "not a SPIFFE trust bundle"),
        (b'{"keys": []}', "0 certificates"),
        (b'{"keys": [{"use": "x509-svid", "x5c": []}]}', "one certificate each"),
        (b'{"keys": [{"use": "x509-svid", "x5c": ["!"]}]}', "cannot be read"),
        (bundle(LEAF), "is not a CA"),
        (b"[" * 100_000, "not a PEM file with certificates"),
        (b'{"keys":' + b"[" * 100_000, "not a SPIFFE trust bundle"),
        (AUTHORITY.pem * 65, "65 certificates"),
        (ODD.public_bytes(Encoding.PEM), "extensions cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bundles_that_are_refused(content: bytes, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        read(TEXT, b=content)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('ca = "b"', "ids is missing"),
        ('ids = "a.example"', "ca is missing"),
        ('ca = "gone"\nids = "a.example"', "cannot read gone"),
        ('ca = "b"\nids = "spiffe://example.org/x"', "set trust_domain"),
        (
            'ca = "b"\nids = "https://example.org/*"\ntrust_domain = "example.org"',
            "must begin with spiffe://example.org/",
        ),
        ('ca = "b"\nids = "spiffe://example.org/"\ntrust_domain = "example.org"', "and continue"),
        ('ca = "b"\nids = "spiffe://example.org*/x"\ntrust_domain = "example.org"', "must begin with"),
        ('ca = "b"\nids = "spiffe://example.org/**/x"\ntrust_domain = "example.org"', "in a place other than its end"),
        (
            'ca = "b"\nids = "spiffe://example.org/x"\ntrust_domain = "spiffe://example.org"',
            "must be a SPIFFE trust domain",
        ),
        ('ca = "b"\nids = "*://example.org/x"', "a URI with a plain scheme"),
        ('ca = "b"\nids = "https://*/x"', "a URI with a plain scheme"),
        ('ca = "b"\nids = "A.example"', "lower case"),
        ('ca = "b"\nids = "a@example"', "or a DNS name of a-z"),
        ('ca = "b"\nids = "https://example.org/a/../b"', "such names are not admitted"),
        ('ca = "b"\nids = "https://example.org/a//b"', "such names are not admitted"),
        ('ca = "b"\nids = "https://example.org/a%41"', "such names are not admitted"),
        ('ca = "b"\nids = "spiffe://example.org/a/"\ntrust_domain = "example.org"', "such names are not admitted"),
        ('ca = "b"\nids = "a b"', "without spaces"),
        ('ca = "b"\nids = "{rank}-{rank}.example"', "one {rank} or {rank/N}"),
        ('ca = "b"\nids = "{node}.example"', "one {rank} or {rank/N}"),
        ('ca = "b"\nids = "{rank/0}.example"', "one {rank} or {rank/N}"),
        ('ca = "b"\nids = "node1{rank}.example"', "a digit or a * beside"),
        ('ca = "b"\nids = "{rank}*.example"', "a digit or a * beside"),
        ('ca = "b"\nids = "a.example"\nranks = "7-0"', "ranks must be a rank such as"),
        ('ca = "b"\nids = "a.example"\nranks = "0-1048576"', "ranks must be a rank such as"),
        ('ca = "b"\nids = "a.example"\nranks = "all"', "ranks must be a rank such as"),
        ('ca = "b"\nids = "a.example"\nroot = "x"', "unknown key 'root'; known here: trust_domain, ids, ranks, ca"),
    ],
)
def test_tables_that_are_refused(text: str, says: str) -> None:
    with pytest.raises(PolicyError, match=says.replace("*", r"\*")):
        read(text, b=AUTHORITY.pem)


@settings(deadline=None)
@given(st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters="*{}"), max_size=40))
def test_a_pattern_without_a_star_matches_itself_only(name: str) -> None:
    assert identity.matches(name, [name])
    assert not identity.matches(name + "x", [name])
    assert not identity.matches("x" + name, [name])


@pytest.mark.parametrize(
    ("pattern", "name", "ranks"),
    [
        ("node-{rank}.example", "node-7.example", {7}),
        ("node-{rank}.example", "node-07.example", set()),
        ("node-{rank}.example", "node-.example", set()),
        ("node-{rank/8}.example", "node-1.example", set(range(8, 16))),
        ("https://h/{rank/4}/*", "https://h/2/7", set(range(8, 12))),
        ("https://h/a/**", "https://h/a/7", set(range(20))),
        ("https://h/run-*/{rank}", "https://h/run-3/5", {5}),
    ],
)
def test_a_pattern_with_a_rank_matches_the_name_of_that_rank(pattern: str, name: str, ranks: set[int]) -> None:
    assert identity.pattern_error(pattern, None) is None
    assert {rank for rank in range(20) if identity.matches(name, [pattern], rank)} == ranks
    assert identity.matches(name, [pattern]) == bool(ranks), "an agent has no rank, and a name of some worker"


@pytest.mark.parametrize(
    ("patterns", "one"),
    [
        (["n{rank}.example"], True),
        (["n{rank}.example", "n{rank}.other"], True),
        (["a/{rank}", "b/{rank}"], True),
        (["n{rank/1}.example"], False),  # would do, and is not recognised
        (["n{rank/8}.example"], False),
        (["n1.example"], False),
        (["a/{rank}/*"], False),
        (["a/{rank}", "a/*"], False),
        (["a/{rank}/b/3", "a/7/b/{rank}"], False),  # a/7/b/3 stands for 7 and 3
    ],
)
def test_names_that_stand_for_one_rank_are_recognised(patterns: list[str], one: bool) -> None:
    assert identity.stand_for_one_rank(patterns) == one


@pytest.mark.promise("A certificate that a rule binds to a rank is rejected for any other rank.")
@pytest.mark.parametrize(
    ("table", "admitted"),
    [('ids = "n{rank/8}.example"', range(8, 16)), ('ids = "n1.example"\nranks = "2-3"', range(2, 4))],
)
def test_a_rule_binds_a_name_to_ranks(table: str, admitted: range) -> None:
    rules = read(f'ca = "b"\n{table}', b=AUTHORITY.pem)
    assert rules.binds_ranks
    verifier, credential = CertificateVerifier(rules, now), AUTHORITY.issue(DNS("n1.example"))
    for rank in range(20):
        entry = worker(rank, 20).entry
        listing = Listing(entry, 2, bytes(32), CertificateProver(credential).endorse(entry, bytes(32)))
        if rank in admitted:
            assert verifier.verify_listing(listing) == "n1.example"
        else:
            with pytest.raises(AdmissionError, match=f"n1.example, presented as rank {rank}; the policy admits n"):
                verifier.verify_listing(listing)
        assert verifier.for_agents().verify_listing(listing) == "n1.example"
    assert verifier.for_agents().content() == verifier.content()


@pytest.mark.parametrize("stars", [2, 3, 8, 1000])
def test_matching_time_is_not_exponential(stars: int) -> None:
    """An expression with three stars takes minutes over such a name, and pytest's limit would end this test."""
    pattern = "spiffe://example.org/" + "-".join(["*"] * stars) + "-gpu"
    assert identity.pattern_error(pattern, "example.org") is None
    assert not identity.matches("spiffe://example.org/" + "-" * 2000, [pattern])


@settings(deadline=None, max_examples=500)
@given(st.text("ab*/.", max_size=8), st.text("ab/.", max_size=8), st.booleans(), st.booleans())
def test_patterns_match_as_their_expressions_would(pattern: str, name: str, is_uri: bool, is_deep: bool) -> None:
    """Against the definition: `*` is one or more characters of one part, `/**` one or more of any."""
    start, stop = ("x://h/", "/") if is_uri else ("", ".")
    deep = is_uri and is_deep
    literals = [re.escape(each) for each in (start + pattern).split("*")]
    expression = f"[^{stop}]+".join(literals) + ("/.+" if deep else "")
    assume("**" not in pattern and not (deep and pattern.endswith("*/")))
    found = identity.matches(start + name, [start + pattern + ("/**" if deep else "")])
    assert found == (re.fullmatch(expression, start + name) is not None)


def test_the_name_is_matched_after_everything_else() -> None:
    """A peer without a valid certificate cannot make a worker compare names, or learn which names it admits."""
    unauthenticated_peer = Authority().issue(spiffe("viewer/7"))
    assert "not issued under an authority of the policy" in refusal(RULES, unauthenticated_peer)
    assert "trainer" not in refusal(RULES, unauthenticated_peer)


@pytest.mark.parametrize(
    "key",
    [
        ec.generate_private_key(ec.SECP256R1()),
        ec.generate_private_key(ec.SECP521R1()),
        ed25519.Ed25519PrivateKey.generate(),
    ],
    ids=["P-256", "P-521", "Ed25519"],
)
def test_a_credential_must_fit_an_endorsement(key: certificate_signature.PrivateKey) -> None:
    """To the byte: the largest chain that is taken makes endorsements that can be sent, whatever the signature's length."""
    even = Authority(key=ed25519.Ed25519PrivateKey.generate())  # whose signatures are all of one length
    leaf = Authority("between", key=even.key).sign("worker", key, [spiffe("trainer/7")])

    def pem(filler: int) -> bytes:
        extra = [x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3"), bytes(filler))]
        padded = even.sign("between", even.key, [], ca=True, extra=extra)
        return b"".join(each.public_bytes(Encoding.PEM) for each in (leaf, padded))

    def is_refused(filler: int) -> bool:
        try:
            return not certificate.read_credential(pem(filler), private_pem(key))
        except ValueError:
            return True

    refused = 8 * bisect.bisect_left(range(500), True, key=lambda each: is_refused(8 * each))
    with pytest.raises(ValueError, match="can be presented"):
        certificate.read_credential(pem(refused), private_pem(key))
    credential = certificate.read_credential(pem(refused - 8), private_pem(key))
    assert ENDORSEMENT_BYTES - 32 < len(shown(credential)) <= ENDORSEMENT_BYTES


def test_room_is_kept_for_the_signature_of_a_long_rsa_key() -> None:
    key = rsa.generate_private_key(65537, 4224)
    assert certificate._most_signature_bytes(key) == len(certificate_signature.sign(key, b"")) == 528


def test_times_come_from_the_given_clock() -> None:
    late = NOW + datetime.timedelta(days=400)
    verifier = CertificateVerifier(RULES, late.timestamp)
    with pytest.raises(AdmissionError, match="expired"):
        verify(Policy((verifier,)), listing(AUTHORITY.issue(spiffe("trainer/7"))))
