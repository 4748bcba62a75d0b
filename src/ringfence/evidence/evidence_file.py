"""Evidence in a file: what a worker would show, kept for people to look at; or evidence as other tools store it.

{"ringfence evidence": 1, "kind": "tdx", "report_data": "64 bytes in hexadecimal", "proof": "base64"}

The proof is what travels in an admission (spec/admission.md), so that what is verified here is what a peer would verify.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import dataclass
from typing import Final

from ringfence.admission.proofs import nvidia, nvidia_chain, snp, snp_report, spdm, tdx_quote
from ringfence.errors import AdmissionError, ConfigurationError
from ringfence.keys import PROOF_LIMIT_BYTES

FILE_BYTES: Final = 1 << 20
KINDS: Final = ("tdx", "snp", "nvidia")
_VERSION: Final = 1
_KEYS: Final = ("ringfence evidence", "kind", "report_data", "proof")
_HEX: Final = re.compile(rb"\s*(?:0x)?([0-9a-fA-F\s]+)")
_REPORT_DATA_BYTES: Final = 64


@dataclass(frozen=True)
class Held:
    """Evidence in hand."""

    kind: str
    proof: bytes
    report_data: bytes  #       what it was asked to be about; empty for GPUs that another tool asked
    other_nonce: bytes = b""  # that tool's

    @property
    def nonce(self) -> bytes:
        """What GPUs were asked to sign."""
        return self.other_nonce or nvidia.nonce_of(self.report_data)

    def text(self) -> str:
        proof = base64.b64encode(self.proof).decode("ascii")
        values = (_VERSION, self.kind, self.report_data.hex(), proof)
        return json.dumps(dict(zip(_KEYS, values, strict=True)), indent=2) + "\n"


def read(content: bytes, certificate: bytes | None = None) -> Held:
    """Evidence as `text` writes it; a bare TDX quote or SEV-SNP report, in binary or hexadecimal form; NVIDIA's JSON.

    A bare SEV-SNP report needs the certificate of its key to be verified; without one its proof has an empty certificate.
    """
    if len(content) > FILE_BYTES:
        raise ConfigurationError(f"an evidence file has at most {FILE_BYTES} bytes")
    if content.lstrip().startswith(b"{"):
        return _read_text(content)
    if content.lstrip().startswith(b"["):
        return _read_nvidia(content)
    digits = _HEX.fullmatch(content)
    if digits:
        try:
            content = bytes.fromhex(digits[1].decode("ascii"))
        except ValueError:
            raise ConfigurationError("hexadecimal digits that are not whole bytes") from None
    try:
        if len(content) == snp_report.REPORT_BYTES:
            report = snp_report.Report.decode(content)
            return Held("snp", snp.encode(content, certificate or b""), report.report_data)
        quote = tdx_quote.trim(content)
        return Held("tdx", quote, tdx_quote.report_data(quote))
    except AdmissionError as error:
        raise ConfigurationError(
            f"neither evidence of ringfence, nor an SEV-SNP report, nor a TDX quote: {error}"
        ) from None


def _read_text(content: bytes) -> Held:
    try:
        found = json.loads(content)
        if set(found) != set(_KEYS) or found[_KEYS[0]] != _VERSION or found["kind"] not in KINDS:
            raise ValueError(f"it must hold {', '.join(_KEYS)}, and a kind of {', '.join(KINDS)}")
        report_data = bytes.fromhex(found["report_data"])
        proof = base64.b64decode(found["proof"], validate=True)
        if len(report_data) != _REPORT_DATA_BYTES or len(proof) > PROOF_LIMIT_BYTES:
            raise ValueError("its report data or its proof has the wrong size")
    except (ValueError, TypeError, RecursionError, binascii.Error) as error:
        raise ConfigurationError(f"not evidence of ringfence: {error}") from None
    return Held(found["kind"], proof, report_data)


def _read_nvidia(content: bytes) -> Held:
    """What NVIDIA's own tools write: a list of GPUs, each with its evidence, certificates and the nonce they were given."""
    try:
        found = json.loads(content)
        nonces = {each["nonce"] for each in found}
        gpus = [_gpu(base64.b64decode(each["evidence"]), base64.b64decode(each["certificate"])) for each in found]
        nonce = bytes.fromhex(nonces.pop())
        if nonces or len(nonce) != spdm.NONCE_BYTES:
            raise ValueError("its GPUs were given several nonces, or one of the wrong size")
        return Held("nvidia", nvidia.encode(gpus), b"", nonce)
    except (ValueError, TypeError, KeyError, RecursionError, AdmissionError) as error:
        raise ConfigurationError(f"not evidence of NVIDIA's tools: {type(error).__name__}: {error}") from None


def _gpu(report: bytes, chain: bytes) -> nvidia.Gpu:
    return nvidia.Gpu(spdm.trim(report), nvidia_chain.chain_of(chain, nvidia.pinned_root()))
