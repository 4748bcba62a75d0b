"""Proofs of an unauthenticated peer: each is refused with an AdmissionError, or equals the recorded one."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache

from cryptography import x509

from ringfence.admission.proofs import (
    certificate,
    certificate_signature,
    nvidia,
    nvidia_chain,
    snp,
    snp_report,
    spdm,
    tdx,
    tdx_quote,
    token,
)
from ringfence.errors import AdmissionError
from ringfence.evidence import workload_api
from tests.certificates import Authority, now, spiffe
from tests.fuzz.target import Target
from tests.unit import nvidia_mint, nvidia_records, snp_records, tdx_records, token_mint
from tests.unit.token_mint import ES256, claims, rules

REFUSED = (AdmissionError,)
JSON_WORDS = (
    b"{", b"}", b"[", b"]", b":", b",", b'"', b"null", b"true", b"false", b"1e999", b"-1", b"9999999999999999999", b"NaN",
    b'"\\ud800"', b'"iss"', b'"exp"', b'"nbf"', b'"aud"', b'"eat_nonce"', b'"dbgstat"', b'"submods"', b'"DIGEST"',
    b'"SHA-256"', b'"alg"', b'"kid"', b'"typ"', b'"crit"', b'"none"',
)  # fmt: skip


# -- certificates ---------------------------------------------------------------------------------------------------


@cache
def _certified() -> tuple[certificate.Rules, bytes, certificate_signature.Statement]:
    authority = Authority()
    statement = certificate_signature.Statement(b"fuzz", (b"what a worker signs",))
    found = certificate.Rules((authority.der,), ("spiffe://example.org/trainer/*",), "example.org")
    between = Authority("between", issuer=authority)
    return found, certificate.sign_statement(between.issue(spiffe("trainer/7")), statement), statement


def _certificate(data: bytes) -> None:
    wanted, good, statement = _certified()
    certificate.verify(wanted, data, statement, now())
    assert data == good, "a changed proof was believed"


def _svids() -> list[bytes]:
    """A response of a Workload API, without SPIFFE's own library: name, certificate and key as fields 1 to 3."""
    found = [b"spiffe://example.org/trainer/7", Authority().der, b"key"]
    svid = b"".join(_field(number, each) for number, each in enumerate(found, 1))
    return [_field(1, svid), _field(1, svid + b"\x28\x01") + _field(2, b"crl") + b"\x1d0000"]


def _field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2, len(data) & 0x7F | 0x80, len(data) >> 7]) + data


def _read_svid(data: bytes) -> None:
    chain, _ = workload_api.parse(data)
    assert all(each[0] == 0x30 for each in chain)


# -- TDX and SNP ----------------------------------------------------------------------------------------------------


def _quotes() -> list[bytes]:
    found = [each.quote for each in (*tdx_records.RECORDS.values(), tdx_records.OUTDATED)]
    return found + [tdx_records.load(name) for name in (*tdx_records.WITHOUT_COLLATERAL, *tdx_records.SGX)]


def _read_quote(data: bytes) -> None:
    tdx_quote.read(data)
    assert len(tdx_quote.report_data(data)) == 64
    assert tdx_quote.trim(data) == data


@cache
def _tdx_terms() -> tuple[tdx.Rules, float, bytes]:
    one = tdx_records.RECORDS["dstack"]
    return tdx_records.rules_for(one), one.now, tdx_quote.report_data(one.quote)


def _verify_quote(data: bytes) -> None:
    wanted, moment, report_data = _tdx_terms()
    found = tdx.verify(data, report_data, wanted, moment)
    assert found.body == tdx_quote.read(tdx_records.RECORDS["dstack"].quote), "another TD was believed"


@cache
def _snp_terms() -> tuple[snp.Rules, float, bytes]:
    one = snp_records.RECORDS["trustee"]
    return snp_records.rules_for(one), one.now, snp_report.SnpReport.decode(one.report).report_data


def _reports() -> list[bytes]:
    return [snp.encode(*each.load()) for each in snp_records.RECORDS.values()]


def _verify_report(data: bytes) -> None:
    wanted, moment, report_data = _snp_terms()
    snp.verify(data, report_data, wanted, moment)
    assert snp.decode(data)[0] == snp_records.RECORDS["trustee"].report, "another guest was believed"


# -- NVIDIA ---------------------------------------------------------------------------------------------------------


def _read_spdm(data: bytes) -> None:
    report = spdm.read(data)
    assert report.signed + report.signature == data
    assert spdm.trim(data + b"\0")[: len(data)] == data if len(data) < spdm.REPORT_BYTES else True
    spdm.driver_version(report)
    spdm.vbios_version(report)


@cache
def _gpu() -> tuple[nvidia.Rules, bytes, x509.Certificate, bytes]:
    top = nvidia_mint.root()
    device = nvidia_mint.Device.under(top)
    gpu = device.gpu(nvidia.nonce_of(bytes(64)))
    found = nvidia.verify_report(gpu, nvidia.nonce_of(bytes(64)), nvidia_mint.NOW, root=top.certificate)
    return nvidia.Rules((found.reference_values(),)), nvidia.encode([gpu]), top.certificate, device.report(bytes(32))


def _gpu_proofs() -> list[bytes]:
    recorded = [*nvidia_records.serialized("multi_gpu_hopper.json"), nvidia_records.RECORDED_BLACKWELL]
    return [_gpu()[1], nvidia.encode([recorded[0].gpu]), nvidia.encode([recorded[-1].gpu])]


def _verify_gpu(data: bytes) -> None:
    wanted, good, top, _ = _gpu()
    nvidia.verify(data, bytes(64), wanted, nvidia_mint.NOW, root=top)
    assert data == good, "another proof was believed"


@cache
def _extensions() -> tuple[list[bytes], x509.Certificate]:
    """What leaves say of their device and its firmware, and the issuer of the first."""
    found = []
    for one in (nvidia_records.RECORDED_HOPPER, nvidia_records.RECORDED_BLACKWELL):
        leaf = x509.load_der_x509_certificate(one.gpu.chain[0])
        found += [each.value.value for each in leaf.extensions if isinstance(each.value, x509.UnrecognizedExtension)]
    return found, x509.load_der_x509_certificate(nvidia_records.RECORDED_HOPPER.gpu.chain[1])


def _read_extension(data: bytes) -> None:
    _, issuer = _extensions()
    if data and data[0] & 1:
        nvidia_chain.read_device_id(data, issuer)
    try:
        nvidia_chain.read_tcb_info(data)
    except AdmissionError:
        nvidia_chain.read_device_id(data, issuer)


def _chains() -> list[bytes]:
    return list(nvidia_records.RECORDED_HOPPER.gpu.chain)


def _verify_chain(data: bytes) -> None:
    """One certificate of a chain is whatever the input says."""
    good = nvidia_records.RECORDED_HOPPER.gpu.chain
    moment = datetime.fromtimestamp(nvidia_records.NOW, UTC)
    for place in range(2):
        changed = (*good[:place], data, *good[place + 1 :])
        if changed != good:
            try:
                nvidia_chain.verify(changed, nvidia.pinned_root(), moment)
            except AdmissionError:
                continue
            raise AssertionError("a changed chain was believed")
    raise AdmissionError("none of NVIDIA's")


# -- tokens ---------------------------------------------------------------------------------------------------------


def _signed(header: bytes, body: bytes) -> bytes:
    return token.encode(ES256.sign_bytes(header, body), {})


@cache
def _tokens() -> list[bytes]:
    answers = [(nvidia_records.FOLDER / name).read_bytes() for name in nvidia_records.TOKENS]
    fresh = [token.encode(signer.sign(claims()), {}) for signer in token_mint.SIGNERS]
    return fresh + [token.encode(*token.read_answer(each)) for each in answers]


def _verify_token(data: bytes) -> None:
    """Also with the recorded tokens' own keys, at their time."""
    token.verify(data, rules(), token_mint.NONCE, token_mint.NOW)
    assert data in _tokens(), "a changed token was believed"


def _header_and_claims() -> list[bytes]:
    header = b'{"alg": "ES256", "kid": "p256", "typ": "JWT"}'
    inner = token_mint.json.dumps(claims(submods={"cpu0": {"x": [1, {"y": None}]}}, aud=["me"])).encode()
    return [b"\0" + header, b"\1" + inner, b"\1" + token_mint.json.dumps(claims()).encode()]


def _verify_signed(data: bytes) -> None:
    """A service that is believed signs whatever claims, or whatever header, the input says."""
    good = b'{"alg": "ES256", "kid": "p256"}'
    proof = _signed(data[1:], b"{}") if data[:1] == b"\0" else _signed(good, data[1:])
    found = token.verify(proof, rules(), token_mint.NONCE, token_mint.NOW).claims
    assert found["iss"] == token_mint.ISSUER
    assert found["ready"] is True
    assert token_mint.NONCE in str(found["eat_nonce"])


def _answers() -> list[bytes]:
    return [(nvidia_records.FOLDER / name).read_bytes() for name in nvidia_records.TOKENS] + [b"a.b.c"]


def _read_answer(data: bytes) -> None:
    found = token.read_answer(data)
    assert token.decode(token.encode(*found)) == found


TARGETS = (
    Target("certificate", lambda: [_certified()[1]], _certificate, REFUSED, bounded=500),
    Target("workload-api", _svids, _read_svid, (ValueError,)),
    Target("tdx-quote", _quotes, _read_quote, REFUSED, longest=16384),
    Target("tdx", _quotes, _verify_quote, REFUSED, bounded=300, longest=16384),
    Target("snp", _reports, _verify_report, REFUSED, bounded=300),
    Target(
        "spdm",
        lambda: [each.gpu.report for each in nvidia_records.records()] + [_gpu()[3]],
        _read_spdm,
        REFUSED,
        longest=spdm.REPORT_BYTES + 64,
    ),
    Target("gpu", _gpu_proofs, _verify_gpu, REFUSED, bounded=300, longest=16384),
    Target("gpu-chain", _chains, _verify_chain, REFUSED, bounded=200),
    Target("gpu-extensions", lambda: _extensions()[0], _read_extension, REFUSED),
    Target("token", _tokens, _verify_token, REFUSED, bounded=500, longest=8192),
    Target("token-claims", _header_and_claims, _verify_signed, REFUSED, bounded=1000, words=JSON_WORDS),
    Target("token-answer", _answers, _read_answer, REFUSED, words=JSON_WORDS, longest=8192),
)
