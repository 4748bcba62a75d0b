"""Vectors of Azure's vTPM (spec/admission.md, kinds 8 and 9): made by the code, and by a second reading of the spec.

RSASSA-PKCS1-v1_5 signs without randomness, so a recorded key makes the same attestation for ever. Hardware reports are not part
of it: bytes of any content stand for them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_der_private_key

from ringfence.admission.binding import Binding
from ringfence.admission.proofs import azure, hcl_report
from ringfence.admission.proofs.snp import Rules as SnpRules
from ringfence.admission.proofs.snp_report import Tcb
from tests import provers
from tests.unit import azure_mint

FILE = Path(__file__).parent / "azure.json"
BINDING = Binding(b"the preimage of a binding")
REPORT, CERTIFICATE, QUOTE = bytes(range(256)) * 4 + bytes(160), b"a certificate", b"a TDX quote"
PCRS = azure_mint.PCRS
SNP = SnpRules((bytes(48),), (("milan", Tcb((("bootloader", 4), ("tee", 0), ("snp", 24), ("microcode", 219)))),))


def from_code(key: bytes) -> dict[str, Any]:
    private = load_der_private_key(key, None)
    assert isinstance(private, rsa.RSAPrivateKey)
    vm = azure_mint.Machine(private, azure_mint.runtime_data(private.public_key()))
    made: list[azure.Attestation] = []

    def collect(nonce: bytes) -> bytes:
        made.append(vm.attestation(nonce))
        return azure.encode_snp(REPORT, CERTIFICATE, made[0])

    proof = provers.of_azure(azure.SNP_KIND, collect).prove(BINDING)
    rules = azure.Rules(SNP, ((7, (PCRS[7], PCRS[6])), (4, (PCRS[4],))), (bytes(8),), ("b", "a"), False)
    return {
        "key": key.hex(),
        "binding": BINDING.digest.hex(),
        "runtime data": vm.runtime.decode(),
        "report data": hcl_report.report_data_of(vm.runtime).hex(),
        "quote": made[0].quote.hex(),
        "signature": made[0].signature.hex(),
        "attestation": made[0].encode().hex(),
        "azure_snp proof": proof.hex(),
        "azure_tdx proof": azure.encode_tdx(QUOTE, made[0]).hex(),
        "snp content": SNP.content().hex(),
        "azure_snp content": rules.content().hex(),
    }


def fresh() -> dict[str, Any]:
    """Make new vectors with a new key, after a change of the format."""
    key = rsa.generate_private_key(65537, 2048)
    return from_code(key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption()))


@pytest.fixture(scope="module")
def vectors() -> Any:
    return json.loads(FILE.read_text())


def test_the_code_makes_the_vectors(vectors: Any) -> None:
    assert from_code(bytes.fromhex(vectors["key"])) == vectors


def test_the_attestation_of_the_vectors_verifies(vectors: Any) -> None:
    report, certificate, attestation = azure.decode_snp(bytes.fromhex(vectors["azure_snp proof"]))
    assert (report, certificate) == (REPORT, CERTIFICATE)
    guest = azure.read_guest(attestation, azure.nonce_of(BINDING.digest))
    assert guest.pcrs == PCRS
    assert azure.decode_tdx(bytes.fromhex(vectors["azure_tdx proof"])) == (QUOTE, attestation)


# -- the spec, read again -------------------------------------------------------------------------------------------


def u(value: int, width: int) -> bytes:
    return value.to_bytes(width, "big")


def blob(data: bytes) -> bytes:
    return u(len(data), 4) + data


def test_an_independent_implementation_makes_the_same_vectors(vectors: Any) -> None:
    private = load_der_private_key(bytes.fromhex(vectors["key"]), None)
    assert isinstance(private, rsa.RSAPrivateKey)
    runtime = vectors["runtime data"].encode()
    assert vectors["report data"] == hashlib.sha256(runtime).hexdigest() + "00" * 32
    name = b"\0\x0b" + hashlib.sha256(b"signer").digest()
    quote = bytes.fromhex("ff544347") + u(0x8018, 2) + u(len(name), 2) + name
    quote += u(32, 2) + hashlib.sha256(bytes.fromhex(vectors["binding"])).digest()
    quote += u(4711, 8) + u(2, 4) + u(0, 4) + u(1, 1) + bytes.fromhex("2020031200120003")
    quote += bytes.fromhex("00000001 000b 03 ffffff") + u(32, 2) + hashlib.sha256(b"".join(PCRS)).digest()
    assert vectors["quote"] == quote.hex()
    signature = private.sign(quote, padding.PKCS1v15(), hashes.SHA256())
    assert vectors["signature"] == signature.hex()
    attestation = blob(runtime) + blob(quote) + blob(signature) + b"".join(PCRS)
    assert vectors["attestation"] == attestation.hex()
    assert vectors["azure_snp proof"] == (blob(REPORT) + blob(CERTIFICATE) + attestation).hex()
    assert vectors["azure_tdx proof"] == (blob(QUOTE) + attestation).hex()
    content = blob(bytes.fromhex(vectors["snp content"])) + b"\0"
    content += u(4, 1) + u(1, 4) + PCRS[4] + u(7, 1) + u(2, 4) + b"".join(sorted((PCRS[6], PCRS[7]))) + b"\xff"
    content += u(1, 4) + blob(bytes(8)) + u(2, 4) + blob(b"a") + blob(b"b")
    assert vectors["azure_snp content"] == content.hex()
