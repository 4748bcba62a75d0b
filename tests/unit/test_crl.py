"""Certificate revocation lists: what the newest list of an issuer revokes is refused, and so is a list that is none."""

from __future__ import annotations

import datetime
from dataclasses import replace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.admission.policy_file.policy_file import PolicyFile
from ringfence.admission.policy_file.toml_table import FOLDER_FILES
from ringfence.admission.proofs import certificate, certificate_path, crl, kinds
from ringfence.admission.proofs.certificate import Credential, Rules
from ringfence.admission.proofs.freshness import REMEMBERED, Memory, Validity
from ringfence.errors import AdmissionError, PolicyError
from tests import certificates
from tests.certificates import HOUR, NOW, Authority, spiffe

AGE = 24 * 3600
CA = Authority()
WORKER = CA.issue(spiffe("trainer/1"), serial=11)
OTHER = CA.issue(spiffe("trainer/2"), serial=12)
MIDDLE = Authority("middle", issuer=CA)
BELOW = MIDDLE.issue(spiffe("trainer/3"), serial=13)
IDS = ("spiffe://example.org/trainer/*",)


def rules(*lists: bytes, ca: Authority = CA, age: int = AGE) -> Rules:
    files = [(f"{place}.crl", each) for place, each in enumerate(lists)]
    revocation = crl.CrlRule.read(files, age, [ca.der])
    return Rules((ca.der,), IDS, "example.org", revocation=revocation)


def verify(by: Rules, who: Credential = WORKER, now: float | None = None) -> str:
    """Verify with a memory of its own, so that tests do not see each other's lists."""
    assert by.revocation is not None
    path = certificate_path.build_path(by.authorities, who.chain)
    moment = certificates.now() if now is None else now
    claims, _ = certificate.verify_chain(replace(by, revocation=None), who.chain, moment)
    verified = certificate._verified_path(path, by, moment)
    assert not isinstance(verified, str)
    replace(by.revocation, memory=Memory()).check(claims.id, verified, moment)
    return claims.id


def refusal(by: Rules, who: Credential = WORKER, now: float | None = None) -> str:
    with pytest.raises(AdmissionError) as caught:
        verify(by, who, now)
    assert "CN=" not in caught.value.to_peer or "revoked by" in caught.value.to_peer
    return str(caught.value)


def at(hours: float) -> datetime.datetime:
    return NOW + hours * HOUR


@pytest.mark.promise("A revoked certificate admits to no further session.")
def test_a_revoked_certificate_is_refused_by_name() -> None:
    by = rules(CA.revoke(11))
    assert refusal(by) == (
        "the certificate of spiffe://example.org/trainer/1 was revoked by 'CN=test authority' on 2030-06-01 "
        "(keyCompromise): it needs a new one"
    )
    assert verify(by, OTHER) == "spiffe://example.org/trainer/2"
    with pytest.raises(AdmissionError, match="trainer/1 was revoked"):  # as a worker verifies it
        certificate.verify_chain(by, WORKER.chain, certificates.now())


@pytest.mark.promise("A revoked certificate admits to no further session.")
def test_every_certificate_below_the_authority_needs_a_list() -> None:
    assert verify(rules(CA.revoke(), MIDDLE.revoke()), BELOW)
    assert "trainer/3 was revoked by 'CN=middle'" in refusal(rules(CA.revoke(), MIDDLE.revoke(13)), BELOW)
    revoked = refusal(rules(CA.revoke(7), MIDDLE.revoke()), BELOW)
    assert (
        "the certificate of authority 'CN=middle', above that of spiffe://example.org/trainer/3, was revoked" in revoked
    )
    for lists in ([CA.revoke()], [MIDDLE.revoke()]):
        assert "there is no list of revoked certificates of" in refusal(rules(*lists), BELOW)


@pytest.mark.promise("A stale, forged or foreign list of revoked certificates admits nobody.")
@pytest.mark.parametrize(
    ("start", "end", "objection"),
    [
        (
            at(-25),
            at(1),
            "was issued at 2030-05-31 11:00 UTC, more than 1 day ago (crl_max_age): fetch the current one",
        ),
        (at(-2), at(-1), "expired at 2030-06-01 11:00 UTC"),
        (at(0.2), at(2), "check the clock"),
    ],
)
def test_a_list_that_is_not_current_is_refused(
    start: datetime.datetime, end: datetime.datetime, objection: str
) -> None:
    assert objection in refusal(rules(CA.revoke(start=start, end=end)))
    assert "was revoked" in refusal(rules(CA.revoke(11, start=start, end=end)))  # it stays revoked


def test_a_list_is_good_up_to_its_age_and_within_five_minutes_before_its_date() -> None:
    by = rules(CA.revoke(start=at(-0.5), end=at(240)))
    first = at(-0.5).timestamp()
    assert verify(by, now=first - 300) and verify(by, now=first)
    assert "is dated" in refusal(by, now=first - 301)
    by = rules(CA.revoke(start=at(-0.5), end=at(240)), age=1800)
    assert verify(by, now=first + 1800)
    assert "more than 30 minutes ago" in refusal(by, now=first + 1801)


@pytest.mark.promise("A stale, forged or foreign list of revoked certificates admits nobody.")
def test_a_forged_list_is_refused_even_beside_a_good_one() -> None:
    forged = CA.revoke(key=ec.generate_private_key(ec.SECP256R1()), number=2)
    for lists in ([forged], [CA.revoke(), forged], [forged, CA.revoke()]):
        assert "was not signed by that authority: remove it, or fetch it again" in refusal(rules(*lists))
    unnamed = CA.revoke(key=rsa.generate_private_key(65537, 2048))
    assert "was not signed by that authority" in refusal(rules(unnamed))


@pytest.mark.promise("A stale, forged or foreign list of revoked certificates admits nobody.")
def test_a_list_of_another_issuer_does_not_count() -> None:
    other = Authority("other authority")
    assert "there is no list of revoked certificates of 'CN=test authority'" in refusal(rules(other.revoke()))
    assert "there is no list" in refusal(rules(Authority().revoke()))  # the same name, and another key
    assert "was not signed" in refusal(rules(CA.revoke(issuer="test authority", key=other.key)))
    assert verify(rules(Authority().revoke(11), CA.revoke()))


def test_an_authority_that_may_not_sign_lists_is_refused() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    own = Authority(key=key)
    usage = certificates.key_usage("key_cert_sign")
    own.__dict__["certificate"] = own.sign(own.name, key, (), ca=True, usage=usage)
    who = own.issue(spiffe("trainer/1"))
    assert "its key usage lacks cRLSign" in refusal(rules(own.revoke(), ca=own), who)


@pytest.mark.promise("Of several lists of one issuer the newest decides, and an older one cannot replace it.")
def test_the_newest_list_decides_in_any_order() -> None:
    old, new = CA.revoke(start=at(-2), number=4), CA.revoke(11, start=at(-1), number=5)
    for lists in ([old, new], [new, old]):
        assert "was revoked" in refusal(rules(*lists))
    released = CA.revoke(start=at(0), number=6)
    for lists in ([old, new, released], [released, new, old]):
        assert verify(rules(*lists))
    assert verify(rules(CA.revoke(11, number=None, start=at(-2)), CA.revoke(number=None)))
    stale = CA.revoke(11, start=at(-1), end=at(-0.5), number=7)  # an older one does not step in
    assert "was revoked" in refusal(rules(CA.revoke(start=at(-2), number=6), stale))


def test_lists_that_contradict_each_other_are_refused() -> None:
    assert "contradict" in refusal(rules(CA.revoke(start=at(-2), number=9), CA.revoke(start=at(-1), number=8)))
    assert "contradict" in refusal(rules(CA.revoke(number=9), CA.revoke(12, number=9)))
    assert verify(rules(CA.revoke(12, number=9), CA.revoke(12, number=9)))


@pytest.mark.promise("Of several lists of one issuer the newest decides, and an older one cannot replace it.")
def test_a_list_that_was_rolled_back_is_refused_by_the_same_process() -> None:
    ca = Authority("rolled back")
    who = ca.issue(spiffe("trainer/1"), serial=11)
    newer, older = rules(ca.revoke(number=5), ca=ca), rules(ca.revoke(start=at(-2), number=4), ca=ca)
    certificate.verify_chain(older, who.chain, certificates.now())
    certificate.verify_chain(newer, who.chain, certificates.now())
    with pytest.raises(AdmissionError, match="was rolled back: it is of 2030-06-01 10:00 UTC") as caught:
        certificate.verify_chain(older, who.chain, certificates.now())
    assert "older than one it has used before" in caught.value.to_peer
    certificate.verify_chain(newer, who.chain, certificates.now())


def test_the_memory_of_lists_is_bounded() -> None:
    memory, moment = Memory(), Validity(NOW, None, 1)
    for about in range(REMEMBERED + 10):
        memory.check(about, moment, "the list")
    assert len(memory._newest) == REMEMBERED


# -- forms ----------------------------------------------------------------------------------------------------------


POINT = x509.UniformResourceIdentifier("http://crl.example.org/1.crl")


def scope(**wrong: object) -> tuple[x509.ExtensionType, bool]:
    values: dict[str, object] = {
        "full_name": [POINT],
        "relative_name": None,
        "only_contains_user_certs": False,
        "only_contains_ca_certs": False,
        "only_some_reasons": None,
        "indirect_crl": False,
        "only_contains_attribute_certs": False,
    }
    return x509.IssuingDistributionPoint(**values | wrong), True  # type: ignore[arg-type]


UNKNOWN = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), b"\x05\0")


@pytest.mark.parametrize(
    ("extension", "text"),
    [
        ((x509.DeltaCRLIndicator(1), True), "delta list"),
        ((x509.DeltaCRLIndicator(1), False), "delta list"),
        (scope(indirect_crl=True), "indirect list"),
        (scope(only_some_reasons=frozenset({x509.ReasonFlags.key_compromise})), "only some reasons"),
        (scope(full_name=None, only_contains_attribute_certs=True), "no certificates"),
        ((UNKNOWN, True), "unknown critical extension 1.2.3.4"),
    ],
)
def test_lists_that_are_not_complete_are_refused(extension: tuple[x509.ExtensionType, bool], text: str) -> None:
    with pytest.raises(ValueError, match=f"x is not a list of revoked certificates: .*{text}"):
        crl.read("x", CA.revoke(extra=[extension]))


def test_unknown_extensions_that_are_not_critical_are_ignored() -> None:
    assert verify(rules(CA.revoke(extra=[(UNKNOWN, False)])))


def test_a_list_for_some_certificates_covers_only_those() -> None:
    point = x509.DistributionPoint([POINT], None, None, None)
    pointed = CA.issue(spiffe("trainer/1"), serial=11, extra=[x509.CRLDistributionPoints([point])])
    part = rules(CA.revoke(extra=[scope()]))
    assert verify(part, pointed)
    assert "there is no list" in refusal(part, WORKER)
    assert "was revoked" in refusal(rules(CA.revoke(11, extra=[scope()])), pointed)
    for limits in (
        x509.DistributionPoint([POINT], None, frozenset({x509.ReasonFlags.key_compromise}), None),
        x509.DistributionPoint([POINT], None, None, [x509.DirectoryName(CA.certificate.subject)]),
    ):
        limited = CA.issue(spiffe("trainer/1"), serial=11, extra=[x509.CRLDistributionPoints([limits])])
        assert "there is no list" in refusal(part, limited)
    users, cas = (scope(full_name=None, **{f"only_contains_{kind}_certs": True}) for kind in ("user", "ca"))
    assert verify(rules(CA.revoke(extra=[users])))
    assert "there is no list" in refusal(rules(CA.revoke(extra=[cas])))
    assert verify(rules(CA.revoke(extra=[cas]), MIDDLE.revoke(extra=[users])), BELOW)


def test_files_have_one_list_in_der_or_several_in_pem_form() -> None:
    der = [CA.revoke(), MIDDLE.revoke()]
    pem = b"".join(x509.load_der_x509_crl(each).public_bytes(Encoding.PEM) for each in der)
    assert [each.raw for each in crl.read("both.pem", b"\n" + pem)] == der
    for wrong in (b"", b"x", der[0] + b"\0", pem + CA.pem, CA.der, CA.pem, b"-----BEGIN X509 CRL-----\n"):
        with pytest.raises(ValueError, match="is not a list of revoked certificates"):
            crl.read("x", wrong)


def test_lists_with_rsa_keys_are_verified() -> None:
    own = Authority(key=rsa.generate_private_key(65537, 2048))
    who = own.issue(spiffe("trainer/1"), serial=5)
    assert verify(rules(own.revoke(), ca=own), who)
    assert "was revoked" in refusal(rules(own.revoke(5), ca=own), who)


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_changed_list_is_refused_or_says_the_same(place: int, bit: int) -> None:
    good = CA.revoke(12)
    changed = bytearray(good)
    changed[place % len(good)] ^= 1 << bit
    try:
        found = rules(bytes(changed))
    except ValueError:
        return
    try:
        verify(found)
    except AdmissionError:
        return
    assert found.revocation is not None  # accepted: bits outside of what is signed differ
    assert found.revocation.lists[0].list.tbs_certlist_bytes == x509.load_der_x509_crl(good).tbs_certlist_bytes


# -- policies -------------------------------------------------------------------------------------------------------

TABLE = '[[admit]]\n[admit.certificate]\nca = "ca.pem"\ntrust_domain = "example.org"\nids = "spiffe://example.org/trainer/*"\n'
LISTED = TABLE + 'crl = "lists"\ncrl_max_age = "1d"\n'


def policy(text: str, **files: bytes) -> PolicyFile:
    def read(path: str, limit: int) -> bytes:
        if path not in found:
            raise FileNotFoundError(2, "No such file or directory")
        return found[path][:limit]

    def names(path: str) -> list[str] | None:
        return [*files, ".hidden"] if path == "lists" else None

    found = {"ca.pem": CA.pem} | {f"lists/{name}": content for name, content in files.items()}
    return kinds.read(f"version = 1\n{text}".encode(), read, "policy.toml", names)


def test_a_folder_of_lists_is_read_without_hidden_files() -> None:
    found = policy(LISTED, b=CA.revoke(number=1), a=CA.revoke(number=2)).rules[0].proofs[0][1]
    assert isinstance(found, Rules) and found.revocation is not None
    assert [each.name for each in found.revocation.lists] == ["lists/a", "lists/b"]
    assert any("not revoked by the newest list of its issuer, which is at most 1 day old" in x for x in found.explain())


def test_the_digest_covers_the_rule_and_its_age_and_no_list() -> None:
    first, second = policy(LISTED, a=CA.revoke()), policy(LISTED, b=CA.revoke(11, 12, number=2))
    assert kinds.digest_of(first) == kinds.digest_of(second)
    others = [policy(TABLE), policy(LISTED.replace("1d", "2d"), a=CA.revoke())]
    assert len({kinds.digest_of(each) for each in (first, *others)}) == 3
    assert [kinds.reads_lists(each) for each in (first, *others)] == [True, False, True]


@pytest.mark.parametrize(
    ("text", "files", "message"),
    [
        (LISTED, {}, "policy.toml, admit 1, certificate: crl: the folder lists is empty"),
        (LISTED, {"a": b"x"}, "crl: lists/a is not a list of revoked certificates"),
        (LISTED, {"a": bytes(crl.LIST_BYTES + 1)}, f"lists/a has more than {crl.LIST_BYTES} bytes"),
        (LISTED, {str(x): CA.revoke() for x in range(6)} | {"x": bytes(12 << 20)}, "is not a list"),
        (LISTED, {str(x): bytes(crl.LIST_BYTES) for x in range(5)}, f"more than {FOLDER_FILES} files or"),
        (TABLE + 'crl = "missing.crl"\ncrl_max_age = "1d"', {}, "crl: cannot read missing.crl: No such file"),
        (TABLE + 'crl = "lists"', {"a": CA.revoke()}, "crl and crl_max_age belong together"),
        (TABLE + 'crl_max_age = "1d"', {}, "crl and crl_max_age belong together"),
    ],
)
def test_a_policy_with_unusable_lists_is_refused(text: str, files: dict[str, bytes], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        policy(text, **files)


@pytest.mark.promise("What one rule of a policy revokes, every rule rejects.")
def test_a_list_of_one_rule_applies_to_its_authorities_in_all_rules() -> None:
    ca = Authority("of two rules")
    who = ca.issue(spiffe("trainer/1"), serial=11)

    def found(*serials: int, issuer: Authority) -> Rules:
        file = policy(TABLE + LISTED, a=issuer.revoke(*serials))
        first = file.rules[0].proofs[0][1]
        assert isinstance(first, Rules) and first.revocation is None and first.shared is not None
        identities = frozenset({crl.identity(ca.certificate)})
        return replace(first, authorities=(ca.der,), shared=replace(first.shared, authorities=identities))

    certificate.verify_chain(found(issuer=ca), who.chain, certificates.now())
    for by, text in ((found(11, issuer=ca), "was revoked"), (found(issuer=CA), "there is no list")):
        with pytest.raises(AdmissionError, match=text):
            certificate.verify_chain(by, who.chain, certificates.now())


def test_a_list_counts_under_an_authority_of_a_rule_without_lists() -> None:
    """One rule trusts the root and has lists; another trusts an intermediate and has none."""
    found = rules(CA.revoke(), MIDDLE.revoke(13)).revocation
    other = Rules((MIDDLE.der,), IDS, "example.org", shared=found)
    direct = Credential(BELOW.chain[:1], BELOW.key)
    with pytest.raises(AdmissionError, match="trainer/3 was revoked"):
        certificate.verify_chain(other, direct.chain, certificates.now())
