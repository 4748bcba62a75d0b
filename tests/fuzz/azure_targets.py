"""Evidence of Azure's vTPM: proofs of a peer, and what a TPM or the metadata service answers to a collector."""

from __future__ import annotations

import base64
import json
import time
from functools import cache

from ringfence.admission.proofs import azure, hcl_report, tpm_quote
from ringfence.errors import AdmissionError, ConfigurationError
from ringfence.evidence import metadata, tpm
from tests.fuzz.target import Target
from tests.unit import azure_mint, snp_mint, tdx_mint
from tests.unit.azure_mint import NONCE, machine
from tests.unit.azure_records import RECORDS, WITHOUT_QUOTE

REFUSED = (AdmissionError,)
WORDS = (
    b"{", b"}", b"[", b"]", b":", b",", b'"', b"null", b"true", b"false", b"1e999", b"9999999999999999999", b"NaN",
    b'"\\ud800"', b'"keys"', b'"kid"', b'"HCLAkPub"', b'"kty"', b'"RSA"', b'"n"', b'"e"', b'"AQAB"', b'"vm-configuration"',
    b'"secure-boot"', b'"vmUniqueId"', b'"quote"', b'"vcekCert"',
)  # fmt: skip


def _read_quote(data: bytes) -> None:
    found = tpm_quote.read(data)
    head, rest = data[:6], data[6:]
    signer = rest[: 2 + int.from_bytes(rest[:2], "big")]
    assert head == b"\xffTCG\x80\x18"
    fields = {"signer": signer, "clock": _clock(found), "safe": bytes([found.is_clock_safe])}
    fields |= {"firmware": found.firmware_version, "digest": b"\0\x20" + found.pcr_digest}
    assert azure_mint.attest(found.extra_data, changes=fields) == data, "two encodings of one quote"


def _clock(quote: tpm_quote.Quote) -> bytes:
    counts = ((quote.clock, 8), (quote.reset_count, 4), (quote.restart_count, 4))
    return b"".join(value.to_bytes(width, "big") for value, width in counts)


def _quotes() -> list[bytes]:
    return [azure_mint.attest(NONCE), *(each.quote for each in RECORDS.values())]


def _reports() -> list[bytes]:
    td = azure_mint.hcl(hcl_report.TDX, azure_mint.td_report(machine().covered), machine().runtime)
    return [WITHOUT_QUOTE, td, *(each.hcl for each in RECORDS.values())]


def _read_report(data: bytes) -> None:
    found = hcl_report.read(data)
    assert len(found.hardware) in (1024, 1184)
    assert found.runtime_data in data and isinstance(found.is_consistent, bool)


def _runtime() -> list[bytes]:
    return [machine().runtime, *(hcl_report.read(each).runtime_data for each in _reports())]


def _read_runtime(data: bytes) -> None:
    found = hcl_report.read_runtime_data(data)
    assert found.attestation_key.key_size >= 2048
    assert found.vm_id.isascii()


# -- proofs ---------------------------------------------------------------------------------------------------------


@cache
def _proofs() -> tuple[bytes, bytes]:
    return machine().snp_proof(), machine().tdx_proof()


def _verify_snp(data: bytes) -> None:
    azure.verify_snp(data, NONCE, azure_mint.snp_rules(), time.time(), known=snp_mint.foundry().roots)
    assert data == _proofs()[0], "a changed proof was believed"


def _verify_tdx(data: bytes) -> None:
    azure.verify_tdx(data, NONCE, azure_mint.tdx_rules(), time.time(), root=tdx_mint.foundry().root)
    found, good = azure.decode_tdx(data), azure.decode_tdx(_proofs()[1])
    assert found[1] == good[1], "a changed attestation of the vTPM was believed"
    assert found[0][:632] == good[0][:632], "another TD was believed"


# -- the collector --------------------------------------------------------------------------------------------------


class _Answers:
    """A TPM that answers with what the input says, one response after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def transmit(self, command: bytes) -> bytes:
        length = int.from_bytes(self._data[:2], "big")
        response, self._data = self._data[2 : 2 + length], self._data[2 + length :]
        return response


def _response(parameters: bytes, is_authorized: bool) -> bytes:
    if is_authorized:
        parameters = len(parameters).to_bytes(4, "big") + parameters + b"\0\0\1\0\0"
    body = bytes(4) + parameters
    whole = (b"\x80\2" if is_authorized else b"\x80\1") + (6 + len(body)).to_bytes(4, "big") + body
    return len(whole).to_bytes(2, "big") + whole


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data


def _responses() -> list[bytes]:
    public = bytes.fromhex("01400001 000b 00060006 0000 0028")
    size = _response(_sized(public) + _sized(b"\0\x0b" + bytes(32)), False)
    pcrs = [
        _response(
            bytes(4) + bytes.fromhex("00000001 000b 03") + bits + (8).to_bytes(4, "big") + _sized(bytes(32)) * 8, False
        )
        for bits in (b"\xff\0\0", b"\0\xff\0", b"\0\0\xff")
    ]
    quote = _response(_sized(azure_mint.attest(NONCE)) + b"\0\x14\0\x0b" + _sized(bytes(256)), True)
    refused = _sized(bytes.fromhex("8001 0000000a 0000018b"))
    return [
        b"\0" + size + _response(_sized(bytes(40)), True),
        b"\1" + quote,
        b"\2" + b"".join(pcrs),
        b"\1" + refused,
    ]


def _collect(data: bytes) -> None:
    """The first byte says which command the collector sends."""
    device = _Answers(data[1:])
    match data[:1]:
        case b"\0":
            assert len(tpm.nv_read(device, 0x01400001, 4096)) <= 4096
        case b"\1":
            tpm.quote(device, 0x81000003, NONCE)
        case _:
            assert {len(each) for each in tpm.read_pcrs(device)} == {32}


def _answers() -> list[bytes]:
    quote = base64.urlsafe_b64encode(machine().tdx_quote[:300]).decode()
    return [json.dumps({"quote": quote}).encode(), b'{"vcekCert": "x", "quote": ""}']


def _read_answer(data: bytes) -> None:
    assert metadata.text_of(data, "quote").isascii()


TARGETS = (
    Target("tpm-quote", _quotes, _read_quote, REFUSED),
    Target("hcl-report", _reports, _read_report, REFUSED, longest=hcl_report.HCL_BYTES),
    Target("hcl-runtime-data", _runtime, _read_runtime, REFUSED, bounded=1000, words=WORDS),
    Target("azure-snp", lambda: [_proofs()[0]], _verify_snp, REFUSED, bounded=300, longest=16384),
    Target("azure-tdx", lambda: [_proofs()[1]], _verify_tdx, REFUSED, bounded=300, longest=16384),
    Target("tpm-response", _responses, _collect, (ConfigurationError,)),
    Target("azure-metadata", _answers, _read_answer, (ConfigurationError,), words=WORDS),
)
