"""Evidence files: what a worker would present, stored for inspection; or evidence as other tools store it.

{"ringfence evidence": 1, "kind": "tdx", "report_data": "64 bytes in hexadecimal", "proof": "base64"}

The proof is encoded as in an admission (spec/admission.md), so that the same bytes are verified as by a peer.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from typing import Final

from ringfence.admission.proofs import nvidia, nvidia_chain, snp, snp_report, spdm, tdx_quote
from ringfence.errors import AdmissionError, ConfigurationError
from ringfence.keys import PROOF_LIMIT_BYTES

FILE_BYTES: Final = 1 << 20
KINDS: Final = ("tdx", "snp", "nvidia", "azure_snp", "azure_tdx")
_VERSION: Final = 1
_KEYS: Final = ("ringfence evidence", "kind", "report_data", "proof")
_HEX: Final = re.compile(rb"\s*(?:0x)?([0-9a-fA-F\s]+)")
_REPORT_DATA_BYTES: Final = 64


@dataclass(frozen=True)
class StoredEvidence:
    """Evidence from a file, or collected on this machine."""

    kind: str
    proof: bytes
    report_data: bytes  #       what it covers; empty for GPU evidence of another tool
    other_nonce: bytes = b""  # the nonce of that tool

    def text(self) -> str:
        proof = base64.b64encode(self.proof).decode("ascii")
        values = (_VERSION, self.kind, self.report_data.hex(), proof)
        return json.dumps(dict(zip(_KEYS, values, strict=True)), indent=2) + "\n"


def read(content: bytes, certificate: bytes | None = None) -> StoredEvidence:
    """Read evidence as written by `text`, a TDX quote or SEV-SNP report in binary or hexadecimal form, or NVIDIA's JSON.

    Verifying an SEV-SNP report needs the certificate of its key; without one the proof has an empty certificate. Raises
    ConfigurationError.
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
            raise ConfigurationError("an odd number of hexadecimal digits") from None
    try:
        if len(content) == snp_report.REPORT_BYTES:
            report = snp_report.SnpReport.decode(content)
            return StoredEvidence("snp", snp.encode(content, certificate or b""), report.report_data)
        quote = tdx_quote.trim(content)
        return StoredEvidence("tdx", quote, tdx_quote.report_data(quote))
    except AdmissionError as error:
        raise ConfigurationError(
            f"neither a ringfence evidence file, nor an SEV-SNP report, nor a TDX quote: {error}"
        ) from None


def _read_text(content: bytes) -> StoredEvidence:
    try:
        found = json.loads(content)
        if set(found) != set(_KEYS) or found[_KEYS[0]] != _VERSION or found["kind"] not in KINDS:
            raise ValueError(f"it must have {', '.join(_KEYS)}, and a kind of {', '.join(KINDS)}")
        report_data = bytes.fromhex(found["report_data"])
        proof = base64.b64decode(found["proof"], validate=True)
        if len(report_data) != _REPORT_DATA_BYTES or len(proof) > PROOF_LIMIT_BYTES:
            raise ValueError("its report data or its proof has the wrong size")
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"not a ringfence evidence file: {error}") from None
    return StoredEvidence(found["kind"], proof, report_data)


def _read_nvidia(content: bytes) -> StoredEvidence:
    """Read the format of NVIDIA's own tools: a list of GPUs, each with its evidence, certificates and nonce."""
    try:
        found = json.loads(content)
        nonces = {each["nonce"] for each in found}
        gpus = [_gpu(base64.b64decode(each["evidence"]), base64.b64decode(each["certificate"])) for each in found]
        nonce = bytes.fromhex(nonces.pop())
        if nonces or len(nonce) != spdm.NONCE_BYTES:
            raise ValueError("its GPUs have different nonces, or one of the wrong size")
        return StoredEvidence("nvidia", nvidia.encode(gpus), b"", nonce)
    except (ValueError, TypeError, KeyError, RecursionError, AdmissionError) as error:
        raise ConfigurationError(f"not an evidence file of NVIDIA's tools: {type(error).__name__}: {error}") from None


def _gpu(report: bytes, chain: bytes) -> nvidia.Gpu:
    return nvidia.Gpu(spdm.trim(report), nvidia_chain.chain_of(chain, nvidia.pinned_root()))
