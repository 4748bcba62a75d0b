"""Evidence of Azure's vTPM under the test roots of SEV-SNP and TDX: a paravisor's hardware report, and quotes of its key."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from ringfence.admission.proofs import azure, hcl_report, tpm_quote
from tests.unit import snp_mint, tdx_mint

PCRS = tuple(hashlib.sha256(b"PCR" + bytes([index])).digest() for index in range(24))
VM_ID = "7DF7B373-B947-4AAA-96E5-C358F2A03D20"
FIRMWARE = bytes.fromhex("2020031200120003")
SIGNER = b"\0\x0b" + hashlib.sha256(b"signer").digest()
NONCE = bytes(range(32))


def jwk(key: rsa.RSAPublicKey, kid: str = "HCLAkPub", operation: str = "sign") -> dict[str, object]:
    def number(value: int) -> str:
        data = value.to_bytes((value.bit_length() + 7) // 8, "big")
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    numbers = key.public_numbers()
    return {"kid": kid, "key_ops": [operation], "kty": "RSA", "e": number(numbers.e), "n": number(numbers.n)}


def runtime_data(key: rsa.RSAPublicKey, is_short: bool = False, **changes: object) -> bytes:
    """The JSON of a paravisor, with the fields of recorded ones. `changes`: of the VM's configuration.

    A short one, without what is not checked, fits an NV index of swtpm: 2,048 bytes, where Azure's has 2,600.
    """
    configuration = {"console-enabled": True, "secure-boot": True, "tpm-enabled": True, "vmUniqueId": VM_ID}
    found = {
        "keys": [jwk(key), *([] if is_short else [jwk(key, "HCLEkPub", "encrypt")])],
        "vm-configuration": configuration | {name.replace("_", "-"): value for name, value in changes.items()},
        "user-data": "0" * 128,
    }
    return json.dumps(found, separators=(",", ":")).encode()


def hcl(kind: int, hardware: bytes, data: bytes, padded: int = 2600) -> bytes:
    """A report as the vTPM stores it."""
    size = 20 + len(data)
    header = b"HCLA" + struct.pack("<4I12x", 2, 32 + 1184 + size, 2, 0)
    request = struct.pack("<5I", size, 1, kind, 1, len(data))
    return (header + hardware.ljust(1184, b"\0") + request + data).ljust(padded, b"\0")


def attest(nonce: bytes, pcrs: tuple[bytes, ...] = PCRS, changes: Mapping[str, bytes] | None = None) -> bytes:
    """The bytes of a TPM quote that are signed. `changes`: other fields, by name."""
    fields = {
        "magic": b"\xffTCG",
        "type": b"\x80\x18",
        "signer": len(SIGNER).to_bytes(2, "big") + SIGNER,
        "extra data": len(nonce).to_bytes(2, "big") + nonce,
        "clock": (4711).to_bytes(8, "big") + (2).to_bytes(4, "big") + bytes(4),
        "safe": b"\1",
        "firmware": FIRMWARE,
        "selection": tpm_quote.SELECTION,
        "digest": b"\0\x20" + hashlib.sha256(b"".join(pcrs)).digest(),
        "end": b"",
    }
    return b"".join((fields | dict(changes or {})).values())


@dataclass(frozen=True)
class Machine:
    """One VM: its vTPM's attestation key, and evidence of its paravisor under a test root."""

    key: rsa.RSAPrivateKey
    runtime: bytes

    @cached_property
    def covered(self) -> bytes:
        return hashlib.sha256(self.runtime).digest() + bytes(32)

    @cached_property
    def snp_report(self) -> bytes:
        return snp_mint.foundry().report(self.covered)

    @cached_property
    def tdx_quote(self) -> bytes:
        return tdx_mint.foundry().quote(self.covered)

    def sign(self, data: bytes) -> bytes:
        return self.key.sign(data, padding.PKCS1v15(), hashes.SHA256())

    def attestation(
        self, nonce: bytes = NONCE, pcrs: tuple[bytes, ...] = PCRS, changes: Mapping[str, bytes] | None = None
    ) -> azure.Attestation:
        quote = attest(nonce, pcrs, changes)
        return azure.Attestation(self.runtime, quote, self.sign(quote), pcrs)

    def snp_proof(self, attestation: azure.Attestation | None = None) -> bytes:
        return azure.encode_snp(self.snp_report, certificate(), attestation or self.attestation())

    def tdx_proof(self, attestation: azure.Attestation | None = None) -> bytes:
        return azure.encode_tdx(self.tdx_quote, attestation or self.attestation())

    def with_runtime(self, **changes: object) -> Machine:
        return replace(self, runtime=runtime_data(self.key.public_key(), False, **changes))


@cache
def certificate() -> bytes:
    return snp_mint.foundry().certificate()


@cache
def machine(number: int = 0) -> Machine:
    """A VM; RSA keys are slow to make."""
    key = rsa.generate_private_key(65537, 2048)
    return Machine(key, runtime_data(key.public_key()))


def snp_rules() -> azure.Rules:
    return azure.Rules(snp_mint.foundry().rules, tuple((index, (PCRS[index],)) for index in (0, 4, 7)))


def tdx_rules() -> azure.Rules:
    return azure.Rules(tdx_mint.foundry().rules, tuple((index, (PCRS[index],)) for index in (0, 4, 7)))


def td_report(covered: bytes) -> bytes:
    """A TDREPORT with this report data, as far as a collector reads it."""
    return (bytes([0x81]) + bytes(127) + covered).ljust(hcl_report.TD_REPORT_BYTES, b"\0")
