"""OCSP responses for NVIDIA's certificates, minted under a test root: only a current one that says good admits."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509 import ocsp
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.admission.binding import Binding
from ringfence.admission.peer_verification import PeerVerifier
from ringfence.admission.policy import Policy
from ringfence.admission.policy_file.policy_file import PolicyFile
from ringfence.admission.proofs import freshness, kinds, nvidia, ocsp_status, reference_values
from ringfence.admission.proofs.nvidia import Rules
from ringfence.admission.proofs.ocsp_status import OcspRule
from ringfence.errors import AdmissionError, PolicyError
from tests.unit import nvidia_mint, ocsp_mint
from tests.unit import peer_verification_samples as samples
from tests.unit.nvidia_mint import Device
from tests.unit.ocsp_mint import HOUR, NOW, REVOKED, UNKNOWN

TOP = nvidia_mint.root()
GPU = Device.under(TOP)
OTHER = Device.under(TOP, 2)
ROM, PROVISIONER, MODEL, _ = ocsp_mint.path_of(GPU, TOP)
BINDING = bytes(64)
AGE = 24 * 3600


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests share the device: each begins with a process that has seen no response."""
    monkeypatch.setattr(freshness.PROCESS, "_newest", {})


def verify(*found: bytes, age: int = AGE, gpu: Device = GPU) -> None:
    """Verify a GPU by a rule with these responses."""
    claims = nvidia.verify_report(
        gpu.gpu(nvidia.nonce_of(BINDING)), nvidia.nonce_of(BINDING), nvidia_mint.NOW, root=TOP.certificate
    )
    files = [(f"{place}.der", each) for place, each in enumerate(found)]
    rules = Rules((claims.reference_values(),), revocation=OcspRule.read(files, age))
    proof = nvidia.encode([gpu.gpu(nvidia.nonce_of(BINDING))])
    nvidia.verify(proof, BINDING, rules, nvidia_mint.NOW, root=TOP.certificate)


def refusal(*found: bytes, **options: object) -> str:
    with pytest.raises(AdmissionError) as caught:
        verify(*found, **options)  # type: ignore[arg-type]
    return str(caught.value)


def with_rom(*found: bytes) -> list[bytes]:
    """The good responses, with others for the boot ROM, which is the device."""
    return [*ocsp_mint.responses(GPU, TOP)[1:], *found]


def of_rom(status: ocsp.OCSPCertStatus = ocsp_mint.GOOD, **wrong: object) -> bytes:
    return ocsp_mint.response(ROM, PROVISIONER, status, **wrong)  # type: ignore[arg-type]


def test_a_gpu_with_good_and_current_responses_is_admitted() -> None:
    verify(*ocsp_mint.responses(GPU, TOP))
    verify(*ocsp_mint.responses(OTHER, TOP), *ocsp_mint.responses(GPU, TOP))
    for algorithm in (hashes.SHA1(), hashes.SHA256(), hashes.SHA512()):
        verify(*with_rom(of_rom(algorithm=algorithm)))
    verify(*with_rom(of_rom(by_key=True)))
    verify(*with_rom(of_rom(end=None)))
    verify(*with_rom(of_rom(extra=[(x509.OCSPNonce(bytes(32)), False)])))


@pytest.mark.promise(
    "A GPU whose certificates NVIDIA has revoked is rejected, and so is one without a current OCSP response."
)
@pytest.mark.parametrize("place", range(3), ids=["device", "provisioner", "model"])
@pytest.mark.parametrize(
    ("status", "text"),
    [
        (REVOKED, r"NVIDIA has revoked certificate \w+ of NVIDIA:GH100:\w+ on 2026-10-31"),
        (UNKNOWN, "the status of .* is unknown"),
    ],
)
def test_a_revoked_or_unknown_certificate_is_refused(place: int, status: ocsp.OCSPCertStatus, text: str) -> None:
    found, path = ocsp_mint.responses(GPU, TOP), ocsp_mint.path_of(GPU, TOP)
    found[place] = ocsp_mint.response(path[place], path[place + 1], status)
    with pytest.raises(AdmissionError, match=text):
        verify(*found)


@pytest.mark.promise(
    "A GPU whose certificates NVIDIA has revoked is rejected, and so is one without a current OCSP response."
)
@pytest.mark.parametrize(
    ("start", "end", "text"),
    [
        (
            NOW - 25 * HOUR,
            NOW + HOUR,
            "more than 1 day ago (ocsp_max_age): fetch a new one with `ringfence evidence ocsp`",
        ),
        (NOW - 25 * HOUR, None, "more than 1 day ago (ocsp_max_age)"),
        (NOW - 3 * HOUR, NOW - HOUR, "expired at 2026-10-31 23:00 UTC"),
        (NOW + HOUR, NOW + 2 * HOUR, "check the clock"),
    ],
)
def test_a_stale_response_is_refused(start: datetime, end: datetime | None, text: str) -> None:
    assert text in refusal(*with_rom(of_rom(start=start, end=end)))


@pytest.mark.promise(
    "A GPU whose certificates NVIDIA has revoked is rejected, and so is one without a current OCSP response."
)
def test_a_response_for_another_certificate_does_not_count() -> None:
    others = ocsp_mint.responses(OTHER, TOP)
    assert f"there is no OCSP response for certificate {ROM.certificate.serial_number:X}" in refusal(
        *with_rom(others[0])
    )
    elsewhere = ocsp_mint.response(ROM, OTHER.above[0])  # the same serial number, of another issuer
    assert "there is no OCSP response" in refusal(*with_rom(elsewhere))
    assert "there is no OCSP response" in refusal(*ocsp_mint.responses(GPU, TOP)[:2])
    assert "there is no OCSP response" in refusal(*with_rom())


@pytest.mark.promise(
    "A GPU whose certificates NVIDIA has revoked is rejected, and so is one without a current OCSP response."
)
def test_a_forged_response_is_refused_even_beside_a_good_one() -> None:
    namesake = MODEL.issue("Test GH100 Provisioner ICA 1", nvidia_mint.issuing())
    forged = of_rom(signer=namesake, certificates=[], start=NOW - HOUR / 2)
    for found in ([forged], [of_rom(), forged], [forged, of_rom()]):
        assert "is not from NVIDIA: its signature is wrong; remove it" in refusal(*with_rom(*found))


def test_a_responder_needs_the_issuers_authorisation() -> None:
    verify(*with_rom(of_rom(signer=ocsp_mint.responder(PROVISIONER))))
    verify(*with_rom(of_rom(signer=ocsp_mint.responder(PROVISIONER), by_key=True)))
    purposes = ExtendedKeyUsageOID.SERVER_AUTH
    wrong = {
        "its signer was not authorised": ocsp_mint.responder(PROVISIONER, purposes),
        "its signer was not authorised to": PROVISIONER.issue("no purpose", [(nvidia_mint.usage(signs=True), True)]),
        "not from NVIDIA": ocsp_mint.responder(MODEL),
        "not from NVIDIA:": ocsp_mint.responder(nvidia_mint.root()),
        "not valid now": ocsp_mint.responder(PROVISIONER, begin=NOW - 9 * HOUR, end=NOW - HOUR),
        "may not sign data": PROVISIONER.issue(
            "no signature",
            [
                (nvidia_mint.usage(issues=True), True),
                (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.OCSP_SIGNING]), False),
            ],
        ),
    }
    for text, signer in wrong.items():
        assert text in refusal(*with_rom(of_rom(signer=signer)))
    absent = of_rom(signer=ocsp_mint.responder(PROVISIONER), certificates=[])
    assert "does not contain the certificate of its signer" in refusal(*with_rom(absent))
    device = of_rom(signer=ROM)  # a device does not vouch for itself
    assert "not authorised" in refusal(*with_rom(device))


def test_the_newest_response_decides_in_any_order() -> None:
    old, new = of_rom(start=NOW - 2 * HOUR), of_rom(REVOKED, start=NOW - HOUR)
    for found in ([old, new], [new, old]):
        assert "has revoked" in refusal(*with_rom(*found))
    verify(*with_rom(of_rom(REVOKED, start=NOW - 3 * HOUR), old))


@pytest.mark.promise("Of several lists of one issuer the newest decides, and an older one cannot replace it.")
def test_a_response_that_was_rolled_back_is_refused_by_the_same_process() -> None:
    verify(*with_rom(of_rom(start=NOW - 3 * HOUR)))
    verify(*with_rom(of_rom(start=NOW - HOUR)))
    assert "was rolled back" in refusal(*with_rom(of_rom(start=NOW - 3 * HOUR)))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is not an OCSP response"),
        (b"x", "is not an OCSP response"),
        (of_rom() + b"\0", "is not an OCSP response"),
        (ocsp.OCSPResponseBuilder.build_unsuccessful(ocsp.OCSPResponseStatus.UNAUTHORIZED), "refused the request"),
        (of_rom(signed_with=hashes.SHA224()), "not signed with SHA-256"),
        (of_rom(algorithm=hashes.SHA224()), "names its certificate with sha224"),
        (
            of_rom(extra=[(x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3"), b"\5\0"), True)]),
            "unknown critical",
        ),
    ],
)
def test_a_file_that_is_no_response_is_refused(content: bytes | ocsp.OCSPResponse, text: str) -> None:
    if isinstance(content, ocsp.OCSPResponse):
        content = content.public_bytes(ocsp_mint.Encoding.DER)
    with pytest.raises(ValueError, match=text):
        ocsp_status.read("x", content)


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_changed_response_is_refused_or_says_the_same(place: int, bit: int) -> None:
    good = of_rom(signer=RESPONDER)
    changed = bytearray(good)
    changed[place % len(good)] ^= 1 << bit
    try:
        verify(*with_rom(bytes(changed)))
    except (ValueError, AdmissionError):
        return
    first, second = (ocsp.load_der_ocsp_response(each) for each in (good, bytes(changed)))
    assert first.tbs_response_bytes == second.tbs_response_bytes


RESPONDER = ocsp_mint.responder(PROVISIONER)

# -- policies -------------------------------------------------------------------------------------------------------

TABLE = '[[admit]]\n[admit.nvidia]\nreference_values = "values.toml"\n'
LISTED = TABLE + 'ocsp = "status"\nocsp_max_age = "12h"\n'


def policy(text: str, *responses: bytes) -> PolicyFile:
    claims = nvidia.verify_report(GPU.gpu(bytes(32)), bytes(32), nvidia_mint.NOW, root=TOP.certificate)
    files = {f"status/{place}": each for place, each in enumerate(responses)}
    files["values.toml"] = reference_values.write(claims.reference_values()).encode()
    names = [str(place) for place in range(len(responses))]
    return kinds.read(
        f"version = 1\n{text}".encode(),
        lambda path, limit: files[path][:limit],
        list_folder=lambda path: names if path == "status" else None,
    )


def test_the_digest_covers_the_rule_and_its_age_and_no_response() -> None:
    first, second = policy(LISTED, of_rom()), policy(LISTED, *ocsp_mint.responses(GPU, TOP))
    assert kinds.digest_of(first) == kinds.digest_of(second)
    others = policy(TABLE), policy(LISTED.replace("12h", "1d"), of_rom())
    assert len({kinds.digest_of(each) for each in (first, *others)}) == 3


@pytest.mark.promise("What one rule of a policy revokes, every rule rejects.")
def test_responses_of_one_rule_apply_to_all_rules() -> None:
    file = policy(TABLE + LISTED, of_rom(REVOKED))
    rules = file.rules[0].proofs[0][1]
    assert isinstance(rules, Rules) and rules.revocation is None
    proof = nvidia.encode([GPU.gpu(nvidia.nonce_of(BINDING))])
    with pytest.raises(AdmissionError, match="NVIDIA has revoked"):
        nvidia.verify(proof, BINDING, rules, nvidia_mint.NOW, root=TOP.certificate)
    nvidia.verify(proof, BINDING, replace(rules, shared=None), nvidia_mint.NOW, root=TOP.certificate)
    lines = [line for rule in file.rules for line in rule.proofs[0][1].explain()]
    assert "not revoked by the newest OCSP responses of NVIDIA, which are at most 12 hours old" in lines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TABLE + 'ocsp = "status"', "ocsp and ocsp_max_age belong together"),
        (TABLE + 'ocsp_max_age = "1d"', "ocsp and ocsp_max_age belong together"),
        (LISTED, "ocsp: status/0 is not an OCSP response"),
    ],
)
def test_a_policy_with_unusable_responses_is_refused(text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        policy(text, b"x")


# -- peer verification ----------------------------------------------------------------------------------------------


@pytest.mark.promise(
    "A GPU whose certificates NVIDIA has revoked is rejected, and so is one without a current OCSP response."
)
def test_a_worker_whose_parent_has_old_responses_fails_peer_verification() -> None:
    """Its parent admitted it with the response of before; the worker that links to it has the new one."""
    now = datetime.fromtimestamp(samples.NOW, UTC)
    times = {"start": now - HOUR, "end": now + HOUR}
    claims = nvidia.verify_report(GPU.gpu(bytes(32)), bytes(32), samples.NOW, root=TOP.certificate)

    def policy_with(*found: bytes) -> Policy:
        files = [("file", each) for each in found]
        rules = Rules((claims.reference_values(),), revocation=OcspRule.read(files, AGE))
        return Policy((nvidia.verifier(rules, lambda: samples.NOW, root=TOP.certificate),))

    good = ocsp_mint.responses(GPU, TOP, **times)
    parent, other = policy_with(*good), policy_with(of_rom(REVOKED, **times), *good[1:])
    assert parent.digest == other.digest

    def make(binding: Binding) -> bytes:
        return nvidia.encode([GPU.gpu(nvidia.nonce_of(binding.digest))])

    made = samples.circle([bytes([rank]) * 32 for rank in range(7)], samples.Technology(nvidia.KIND, parent, make))
    presented = made.presentations[5].encode()
    made.peer_verifier(0).verify(5, presented)
    strict = PeerVerifier(other, made.roster, 0, made.presentations[0], samples.NOW, samples.PATIENCE)
    with pytest.raises(
        AdmissionError, match=r"worker 5, which worker 1 admitted, failed peer verification.*has revoked"
    ):
        strict.verify(5, presented)
