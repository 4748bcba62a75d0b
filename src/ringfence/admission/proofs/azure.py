"""Proof by a confidential VM on Azure: AMD's or Intel's hardware attests the paravisor, whose vTPM attests the guest.

    hardware report  ──covers──►  runtime data  ──names──►  attestation key  ──signs──►  quote over binding and PCRs

azure_snp: proof = blob SEV-SNP report ‖ blob VCEK ‖ attestation.      azure_tdx: proof = blob TDX quote ‖ attestation.
attestation = blob runtime data ‖ blob TPM quote ‖ blob signature ‖ 24 PCRs (32 bytes each).
The extra data of the TPM quote is SHA-256(binding).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.policy import Clock
from ringfence.admission.policy_file.toml_table import TomlTable
from ringfence.admission.proofs import hcl_report, snp, snp_chain, snp_report, tdx, tdx_quote, tpm_quote
from ringfence.admission.proofs.attestation import MEASURE, AttestationVerifier, encode_lists
from ringfence.admission.proofs.hcl_report import RuntimeData
from ringfence.admission.proofs.tpm_quote import PCR_BYTES, PCRS, Quote
from ringfence.errors import AdmissionError, ProtocolError

SNP_KIND: Final = 8
TDX_KIND: Final = 9
SNP_NAME: Final = "SEV-SNP on Azure"
TDX_NAME: Final = "TDX on Azure"
RESETTABLE: Final = frozenset({16, 23})  # at locality 0, which is that of the guest's software (TCG PC Client profile)


@dataclass(frozen=True)
class Rules:
    """The table [admit.azure_snp] or [admit.azure_tdx]: rules for the paravisor's hardware report, and for the guest."""

    hardware: snp.Rules | tdx.Rules
    pcrs: tuple[tuple[int, tuple[bytes, ...]], ...]  # index and accepted values; a PCR that is not named: any
    tpm_firmware: tuple[bytes, ...] = ()  #            empty: any
    vm_ids: tuple[str, ...] = ()  #                    empty: any
    require_secure_boot: bool = True

    def content(self) -> bytes:
        """Return a canonical encoding, independent of the order of lists in the policy."""
        parts = [encoding.blob(self.hardware.content()), encoding.number(self.require_secure_boot, 1)]
        for index, values in sorted(self.pcrs):
            parts += [encoding.number(index, 1), encoding.number(len(values), 4), *sorted(values)]
        parts.append(encoding.number(0xFF, 1))
        parts.append(encode_lists((self.tpm_firmware, [each.encode() for each in self.vm_ids])))
        return b"".join(parts)

    def explain(self) -> list[str]:
        """Describe what it admits, one line each."""
        lines = ["a confidential VM on Azure, whose paravisor (HCL) is attested as:"]
        lines += [f"  {line}" for line in self.hardware.explain()]
        lines.append("and whose vTPM attests the guest:")
        lines += [f"  PCR {index} {' or '.join(each.hex() for each in values)}" for index, values in self.pcrs]
        free = [str(index) for index in range(PCRS) if index not in dict(self.pcrs)]
        if free:
            lines.append(f"  any PCR {', '.join(free)}: the policy does not pin them")
        if self.tpm_firmware:
            lines.append("  vTPM firmware " + " or ".join(each.hex() for each in self.tpm_firmware))
        if self.vm_ids:
            lines.append("  of the VM " + " or ".join(self.vm_ids))
        lines.append("  started with secure boot" if self.require_secure_boot else "  with or without secure boot")
        return lines


def read_snp_rules(table: TomlTable) -> Rules:
    """Read the table [admit.azure_snp] of a policy: the keys of [admit.snp], and those of the vTPM. Raises PolicyError."""
    return read_keys(table, snp.read_rules(table))


def read_tdx_rules(table: TomlTable) -> Rules:
    """Read the table [admit.azure_tdx] of a policy: the keys of [admit.tdx], and those of the vTPM. Raises PolicyError."""
    return read_keys(table, tdx.read_rules(table))


def read_keys(table: TomlTable, hardware: snp.Rules | tdx.Rules) -> Rules:
    """Read the keys of the vTPM. Raises PolicyError."""
    inner = table.table("pcrs")
    indices = [str(index) for index in range(PCRS)]
    pcrs = tuple((int(name), inner.hexes(name, PCR_BYTES)) for name in indices if name in inner.names)
    if not pcrs:
        raise table.error(f"pcrs must have a value for at least one of 0 to {PCRS - 1}; {MEASURE}")
    if all(index in RESETTABLE for index, _ in pcrs):
        raise table.error(f"pcrs pins only 16 and 23, which any software in the guest can reset; {MEASURE}")
    return Rules(
        hardware=hardware,
        pcrs=pcrs,
        tpm_firmware=table.hexes("tpm_firmware", tpm_quote.FIRMWARE_BYTES, ()),
        vm_ids=table.texts("vm_id", ()),
        require_secure_boot=table.flag("require_secure_boot", True),
    )


# -- encoding -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attestation:
    """The vTPM's part of a proof."""

    runtime_data: bytes
    quote: bytes
    signature: bytes
    pcrs: tuple[bytes, ...]  # 24

    def encode(self) -> bytes:
        blobs = (self.runtime_data, self.quote, self.signature)
        return b"".join(encoding.blob(each) for each in blobs) + b"".join(self.pcrs)

    @classmethod
    def read(cls, reader: encoding.Reader) -> Attestation:
        """Read it from the end of a proof. Raises ProtocolError."""
        found = cls(
            runtime_data=reader.blob(hcl_report.RUNTIME_BYTES),
            quote=reader.blob(tpm_quote.QUOTE_BYTES),
            signature=reader.blob(tpm_quote.SIGNATURE_BYTES),
            pcrs=tuple(reader.take(PCR_BYTES) for _ in range(PCRS)),
        )
        reader.end()
        return found


def encode_snp(report: bytes, certificate: bytes, attestation: Attestation) -> bytes:
    return encoding.blob(report) + encoding.blob(certificate) + attestation.encode()


def decode_snp(proof: bytes) -> tuple[bytes, bytes, Attestation]:
    """Decode a proof to report, certificate and the vTPM's part. Raises AdmissionError."""
    reader = encoding.Reader(proof)
    try:
        report, certificate = reader.blob(snp_report.REPORT_BYTES), reader.blob(snp_chain.LEAF_BYTES)
        return report, certificate, Attestation.read(reader)
    except ProtocolError as error:
        raise AdmissionError(f"the proof of {SNP_NAME} is malformed: {error}") from None


def encode_tdx(quote: bytes, attestation: Attestation) -> bytes:
    return encoding.blob(quote) + attestation.encode()


def decode_tdx(proof: bytes) -> tuple[bytes, Attestation]:
    """Decode a proof to TDX quote and the vTPM's part. Raises AdmissionError."""
    reader = encoding.Reader(proof)
    try:
        return reader.blob(tdx_quote.QUOTE_BYTES), Attestation.read(reader)
    except ProtocolError as error:
        raise AdmissionError(f"the proof of {TDX_NAME} is malformed: {error}") from None


# -- verification ---------------------------------------------------------------------------------------------------


def nonce_of(binding_digest: bytes) -> bytes:
    """Return the extra data of the quote: 32 bytes, so the binding's 64 are hashed. Not every TPM takes 64."""
    return hashlib.sha256(binding_digest).digest()


@dataclass(frozen=True)
class Guest:
    """The claims of a verified vTPM about its guest."""

    runtime: RuntimeData
    quote: Quote
    pcrs: tuple[bytes, ...]


def read_guest(attestation: Attestation, nonce: bytes) -> Guest:
    """Verify the vTPM's part for itself: nonce, signature, and PCR values. Raises AdmissionError.

    It is worth as much as its runtime data: the caller verifies that a hardware report covers that.
    """
    quote = tpm_quote.read(attestation.quote)
    if not keys.same(quote.extra_data, nonce):  # first, as it is cheap and stops replayed quotes
        raise AdmissionError("the TPM quote was made for another connection or another worker (its extra data differs)")
    runtime = hcl_report.read_runtime_data(attestation.runtime_data)
    tpm_quote.verify(attestation.quote, attestation.signature, runtime.attestation_key)
    if not keys.same(tpm_quote.digest_of(attestation.pcrs), quote.pcr_digest):
        raise AdmissionError("the PCR values are not those of the TPM quote")
    return Guest(runtime, quote, attestation.pcrs)


def check_covered(report_data: bytes, attestation: Attestation) -> bytes:
    """Check that a hardware report with this report data covers the runtime data; return it. Raises AdmissionError."""
    expected = hcl_report.report_data_of(attestation.runtime_data)
    if not keys.same(report_data, expected):
        raise AdmissionError(
            "the hardware report does not cover the vTPM's runtime data, and so not its attestation key"
        )
    return expected


def check(guest: Guest, rules: Rules) -> None:
    """Check the claims about the guest against the policy. Raises AdmissionError, which says what to do."""
    if rules.require_secure_boot and not guest.runtime.has_secure_boot:
        raise AdmissionError("the VM was started without secure boot: turn it on, or set require_secure_boot to false")
    if rules.vm_ids and guest.runtime.vm_id not in rules.vm_ids:
        raise AdmissionError(f"its vm_id is {guest.runtime.vm_id}, which the policy does not list; {MEASURE}")
    firmware = guest.quote.firmware_version
    if rules.tpm_firmware and firmware not in rules.tpm_firmware:
        raise AdmissionError(f"its tpm_firmware is {firmware.hex()}, which the policy does not list; {MEASURE}")
    for index, allowed in rules.pcrs:
        if guest.pcrs[index] not in allowed:
            raise AdmissionError(
                f"its PCR {index} is {guest.pcrs[index].hex()}, which the policy does not list; {MEASURE}"
            )


def verify_snp(
    proof: bytes, nonce: bytes, rules: Rules, now: float, *, known: snp_chain.Roots | None = None
) -> tuple[snp.Claims, Guest]:
    """Verify a proof of kind azure_snp over `nonce`. `known` is for tests; a policy cannot set it. Raises AdmissionError."""
    report, certificate, attestation = decode_snp(proof)
    guest = read_guest(attestation, nonce)
    covered = check_covered(snp_report.SnpReport.decode(report).report_data, attestation)
    assert isinstance(rules.hardware, snp.Rules)
    claims = snp.verify(snp.encode(report, certificate), covered, rules.hardware, now, known=known)
    check(guest, rules)
    return claims, guest


def verify_tdx(
    proof: bytes, nonce: bytes, rules: Rules, now: float, *, root: bytes | None = None
) -> tuple[tdx.Claims, Guest]:
    """Verify a proof of kind azure_tdx over `nonce`. `root` is for tests; a policy cannot set it. Raises AdmissionError."""
    quote, attestation = decode_tdx(proof)
    guest = read_guest(attestation, nonce)
    covered = check_covered(tdx_quote.read(quote).report_data, attestation)
    assert isinstance(rules.hardware, tdx.Rules)
    claims = tdx.verify(quote, covered, rules.hardware, now, root=root)
    check(guest, rules)
    return claims, guest


def snp_verifier(rules: Rules, clock: Clock, *, known: snp_chain.Roots | None = None) -> AttestationVerifier[Rules]:
    """Return the verifier of SEV-SNP guests on Azure by the rules of one table. `known` is for tests."""

    def check(proof: bytes, digest: bytes, rules: Rules, now: float) -> object:
        return verify_snp(proof, nonce_of(digest), rules, now, known=known)

    return AttestationVerifier(SNP_KIND, SNP_NAME, rules, clock, check, roots=snp_chain.roots_content(known))


def tdx_verifier(rules: Rules, clock: Clock, *, root: bytes | None = None) -> AttestationVerifier[Rules]:
    """Return the verifier of TDX guests on Azure by the rules of one table. `root` is for tests."""
    tdx.load_library()  # fails at the start, not when the first peer connects

    def check(proof: bytes, digest: bytes, rules: Rules, now: float) -> object:
        return verify_tdx(proof, nonce_of(digest), rules, now, root=root)

    return AttestationVerifier(TDX_KIND, TDX_NAME, rules, clock, check, roots=root or b"")
