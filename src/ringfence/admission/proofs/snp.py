"""Proof by AMD SEV-SNP: AMD's hardware attests that the worker runs in a guest with a measurement of the policy.

proof = blob report (1,184 bytes) ‖ blob endorsement certificate (VCEK or VLEK, DER). REPORT_DATA is the binding.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import partial
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.policy import Clock
from ringfence.admission.policy_file.toml_table import TomlTable
from ringfence.admission.proofs.attestation import MEASURE, AttestationVerifier, encode_lists
from ringfence.admission.proofs.snp_chain import LEAF_BYTES, Endorsement, Roots, endorsement, pinned, roots_content
from ringfence.admission.proofs.snp_report import PRODUCTS, REPORT_BYTES, GuestPolicy, Product, SnpReport, Tcb
from ringfence.admission.proofs.snp_revocation import FETCH, RevocationList
from ringfence.errors import AdmissionError, ProtocolError

KIND: Final = 4
NAME: Final = "SEV-SNP"

_VLEK: Final = 1


@dataclass(frozen=True)
class Rules:
    """The table [admit.snp]. Only product lines with a minimum TCB are admitted."""

    measurements: tuple[bytes, ...]
    minimum_tcb: tuple[tuple[str, Tcb], ...]
    vmpl: int = 0
    guest_svn: int = 0
    host_data: tuple[bytes, ...] = ()  #          empty: any
    id_key_digests: tuple[bytes, ...] = ()  #     empty: any
    author_key_digests: tuple[bytes, ...] = ()  # empty: any
    chip_ids: tuple[bytes, ...] = ()  #           empty: any genuine chip
    vlek_providers: tuple[str, ...] = ()  #       empty: no VLEK
    allow_smt: bool = True
    allow_migration: bool = False
    allow_cxl: bool = False
    require_single_socket: bool = False
    require_ciphertext_hiding: bool = False
    allow_provisional_firmware: bool = False
    require_alias_check: bool = True
    mitigations: tuple[tuple[str, int], ...] = ()  # bits by product line, which launch and current firmware must have
    revoked: tuple[RevocationList, ...] = ()  #   empty: not checked
    listed: tuple[RevocationList, ...] = ()  #    by other rules of the policy

    def content(self) -> bytes:
        """Return a canonical encoding, independent of the order of lists in the policy."""
        lists: list[tuple[bytes, ...]] = [self.measurements, self.host_data, self.id_key_digests]
        lists += [self.author_key_digests, self.chip_ids, tuple(each.encode() for each in self.vlek_providers)]
        lists.append(tuple(f"{name}: {tcb}".encode() for name, tcb in self.minimum_tcb))
        lists.append(tuple(f"{name}: {bits:#x}".encode() for name, bits in self.mitigations))
        lists.append(tuple(each.digest for each in self.revoked))
        flags = [self.allow_smt, self.allow_migration, self.allow_cxl, self.allow_provisional_firmware]
        flags += [self.require_single_socket, self.require_ciphertext_hiding, self.require_alias_check]
        numbers = encoding.number(self.vmpl, 1) + encoding.number(self.guest_svn, 4) + bytes(flags)
        return numbers + encode_lists(lists)

    def explain(self) -> list[str]:
        """Describe what it admits, one line each."""
        lines = ["an AMD SEV-SNP guest, never one that its host may debug"]
        lines.append("launched with measurement " + " or ".join(each.hex() for each in self.measurements))
        lines += [
            f"on {name.capitalize()} with firmware of at least {tcb}: reported, at launch and committed"
            for name, tcb in self.minimum_tcb
        ]
        lines += [f"on {name.capitalize()} with mitigations {bits:#x}" for name, bits in self.mitigations]
        lines.append(f"attested from VMPL {self.vmpl}")
        named = (
            ("guest SVN of at least", (str(self.guest_svn),) if self.guest_svn else ()),
            ("HOST_DATA", tuple(each.hex() for each in self.host_data)),
            ("identity key", tuple(each.hex() for each in self.id_key_digests)),
            ("author key", tuple(each.hex() for each in self.author_key_digests)),
            ("chip", tuple(each.hex() for each in self.chip_ids)),
        )
        lines += [f"{name} {' or '.join(values)}" for name, values in named if values]
        if self.vlek_providers:
            lines.append(
                "endorsed by its chip's key, or by a key that AMD issued to " + " or ".join(self.vlek_providers)
            )
        else:
            lines.append("endorsed by its chip's own key (VCEK)")
        lines += [f"not revoked by AMD's list, which is valid until {each.end:%Y-%m-%d}" for each in self.revoked]
        flags = (
            (not self.allow_smt, "without simultaneous multithreading"),
            (not self.allow_migration, "that cannot migrate"),
            (self.allow_migration, "that a migration agent may move to another machine"),
            (self.allow_cxl, "that may use CXL memory"),
            (self.require_single_socket, "kept to one socket"),
            (self.require_ciphertext_hiding, "with ciphertext hiding"),
            (not self.allow_provisional_firmware, "on firmware that its host has committed"),
            (self.allow_provisional_firmware, "on firmware that its host may roll back"),
            (self.require_alias_check, "on a platform that has checked its memory for aliases"),
            (not self.require_alias_check, "on a platform that may not have checked its memory for aliases (BadRAM)"),
        )
        return lines + [text for is_said, text in flags if is_said]


def read_rules(table: TomlTable) -> Rules:
    """Read the keys of a table about an SEV-SNP guest. No key can set another root than AMD's. Raises PolicyError."""
    inner = table.table("minimum_tcb")
    minimum = []
    for product in PRODUCTS.values():
        values = inner.table(product.name, None)
        if values is not None:
            parts = tuple((part, values.number(part, most=255)) for part in product.tcb_parts)
            minimum.append((product.name, Tcb(parts)))
    if not minimum:
        raise table.error("minimum_tcb must name at least one of " + ", ".join(PRODUCTS) + f"; {MEASURE}")
    rules = Rules(
        measurements=table.hexes("measurement", 48),
        minimum_tcb=tuple(minimum),
        vmpl=table.number("vmpl", 0, most=3),
        guest_svn=table.number("guest_svn", 0, most=(1 << 32) - 1),
        host_data=table.hexes("host_data", 32, ()),
        id_key_digests=table.hexes("id_key_digest", 48, ()),
        author_key_digests=table.hexes("author_key_digest", 48, ()),
        chip_ids=table.hexes("chip_id", 64, ()),
        vlek_providers=table.texts("vlek_providers", ()),
        allow_smt=table.flag("allow_smt", True),
        allow_migration=table.flag("allow_migration", False),
        allow_cxl=table.flag("allow_cxl", False),
        require_single_socket=table.flag("require_single_socket", False),
        require_ciphertext_hiding=table.flag("require_ciphertext_hiding", False),
        allow_provisional_firmware=table.flag("allow_provisional_firmware", False),
        require_alias_check=table.flag("require_alias_check", True),
        mitigations=_mitigations(table, table.table("mitigations", None), dict(minimum)),
        revoked=tuple(_revoked(table, each) for each in table.files("crl", ())),
    )
    if rules.chip_ids and rules.vlek_providers:
        raise table.error("chip_id and vlek_providers exclude each other: a VLEK is not bound to a chip")
    return rules


def _mitigations(table: TomlTable, inner: TomlTable | None, admitted: Container[str]) -> tuple[tuple[str, int], ...]:
    if inner is None:
        return ()
    bits = ((name, inner.number(name, None, least=1)) for name in PRODUCTS)
    found = tuple((name, value) for name, value in bits if value is not None)
    for name, _ in found:
        if name not in admitted:
            raise table.error(f"mitigations names {name}, and minimum_tcb does not: such a platform is not admitted")
    return found


def _revoked(table: TomlTable, content: bytes) -> RevocationList:
    try:
        return RevocationList.parse(content)
    except ValueError as error:
        raise table.error(f"crl: {error}; {FETCH}") from None


# -- verification ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claims:
    """The claims of a verified report."""

    report: SnpReport
    product: Product
    tcb: Tcb
    provider: str | None  # None: endorsed by its own chip's VCEK


def authenticate(
    report: bytes,
    certificate: bytes,
    now: float,
    *,
    known: Roots | None = None,
    revoked: tuple[RevocationList, ...] = (),
    listed: tuple[RevocationList, ...] = (),
) -> Claims:
    """Verify that AMD's hardware signed the report, whatever its values. Raises AdmissionError."""
    decoded = SnpReport.decode(report)
    if decoded.is_masked:
        raise AdmissionError("its host masks the chip's key, so the report is not signed: unmask it (MASK_CHIP_KEY)")
    endorsed = endorsement(certificate, pinned() if known is None else known, now, revoked, listed)
    try:
        endorsed.key.verify(encode_dss_signature(*decoded.signature), decoded.signed, ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        raise AdmissionError(
            "the report was not signed with the key of its certificate: the VCEK is of another chip, or the report was changed"
        ) from None
    _check_key(decoded, endorsed)
    _check_product(decoded, endorsed.product)
    tcb = endorsed.product.tcb(decoded.reported_tcb)
    if tcb != endorsed.tcb:
        raise AdmissionError(
            f"the report is for TCB {tcb}, its certificate for {endorsed.tcb}: fetch the matching certificate"
        )
    return Claims(decoded, endorsed.product, tcb, endorsed.provider)


def _check_key(report: SnpReport, endorsed: Endorsement) -> None:
    if report.signing_key != (0 if endorsed.provider is None else _VLEK):
        raise AdmissionError("the report names another kind of key (VCEK or VLEK) than its certificate")
    if endorsed.chip is not None:
        chip = endorsed.chip.ljust(len(report.chip_id), b"\0")
        if report.chip_id != chip:
            raise AdmissionError(f"the report is from chip {report.chip_id[:8].hex()}, its VCEK for {chip[:8].hex()}")


def _check_product(report: SnpReport, product: Product) -> None:
    if product in report.products:
        return
    said = f"version {report.version}" if report.cpu is None else "CPU family {:#x}, model {:#x}".format(*report.cpu)
    raise AdmissionError(f"the report is of {said}; its certificate is for {product.name.capitalize()}")


def check(claims: Claims, rules: Rules) -> None:
    """Check the claims against the policy. Raises AdmissionError, which says what to do."""
    report = claims.report
    minimum = dict(rules.minimum_tcb).get(claims.product.name)
    if minimum is None:
        wanted = " or ".join(name.capitalize() for name, _ in rules.minimum_tcb)
        to_peer = f"it runs on {claims.product.name.capitalize()}"
        raise AdmissionError(
            f"{to_peer}, and the policy admits {wanted}; {MEASURE}",
            to_peer=f"{to_peer}, which the policy does not admit",
        )
    _check_firmware(claims, minimum, rules.allow_provisional_firmware)
    _check_platform(claims, rules)
    if claims.provider is not None and claims.provider not in rules.vlek_providers:
        raise AdmissionError(f"it is endorsed by a VLEK of {claims.provider!r}, which vlek_providers does not name")
    _check_guest_policy(report.policy, rules)
    if report.vmpl != rules.vmpl:
        to_peer = f"the report was asked for at VMPL {report.vmpl}"
        raise AdmissionError(
            f"{to_peer}, the policy wants {rules.vmpl}", to_peer=f"{to_peer}, the policy wants another"
        )
    if report.guest_svn < rules.guest_svn:
        to_peer = f"its guest SVN is {report.guest_svn}, the policy wants"
        raise AdmissionError(f"{to_peer} at least {rules.guest_svn}", to_peer=f"{to_peer} a higher one")
    values = (
        ("measurement", report.measurement, rules.measurements),
        ("host_data", report.host_data, rules.host_data or (report.host_data,)),
        ("id_key_digest", report.id_key_digest, rules.id_key_digests or (report.id_key_digest,)),
        ("author_key_digest", report.author_key_digest, rules.author_key_digests or (report.author_key_digest,)),
        ("chip_id", report.chip_id, rules.chip_ids or (report.chip_id,)),
    )
    for name, value, allowed in values:
        if value not in allowed:
            raise AdmissionError(f"its {name} is {value.hex()}, which the policy does not list; {MEASURE}")


def _check_firmware(claims: Claims, minimum: Tcb, allow_provisional: bool) -> None:
    """Check the minimum for the reported TCB, the TCB at launch, and the committed TCB, to which the host can roll back."""
    report, product = claims.report, claims.product
    current, committed, launch = map(product.tcb, (report.current_tcb, report.committed_tcb, report.launch_tcb))
    for name, tcb, todo in (
        ("REPORTED", claims.tcb, "update the host"),
        ("COMMITTED", committed, "have the host commit its firmware (SNP_COMMIT)"),
        ("LAUNCH", launch, "launch the guest again"),
    ):
        if old := tcb.below(minimum):
            raise AdmissionError(
                f"its firmware is out of date: {', '.join(old)} in {name}_TCB; {todo}",
                to_peer=f"its firmware is out of date ({name}_TCB is {tcb}); {todo}",
            )
    for other in (claims.tcb, committed):  # so CURRENT_TCB is at least the minimum, too
        if old := current.below(other):
            raise AdmissionError(f"the report contradicts itself: CURRENT_TCB has {', '.join(old)}; update the host")
    if report.current_version < report.committed_version:
        raise AdmissionError(
            "the report contradicts itself: its current version is below the committed one; update the host"
        )
    if not allow_provisional and (current, report.current_version) != (committed, report.committed_version):
        raise AdmissionError(
            f"its firmware is provisional, {current}, where its host has committed {committed}: "
            "have the host commit it, or set allow_provisional_firmware"
        )


def _check_platform(claims: Claims, rules: Rules) -> None:
    report = claims.report
    if rules.require_alias_check and not report.has_checked_aliases:
        raise AdmissionError(
            "the report does not state that its host has checked the memory for aliases (ALIAS_CHECK_COMPLETE, against BadRAM; "
            "from report version 3 on): update the host's firmware, or set require_alias_check to false"
        )
    wanted = dict(rules.mitigations).get(claims.product.name, 0)
    for name, bits in (("LAUNCH", report.launch_mitigations), ("CURRENT", report.current_mitigations)):
        if missing := wanted & ~bits:
            raise AdmissionError(
                f"it lacks mitigations {missing:#x} in {name}_MIT_VECTOR: update the host, and launch the guest again",
                to_peer=f"it lacks mitigations in {name}_MIT_VECTOR: update the host, and launch the guest again",
            )


def _check_guest_policy(policy: GuestPolicy, rules: Rules) -> None:
    if policy.debug:
        raise AdmissionError("its host may debug the guest and read its memory: launch it with a policy without debug")
    if not policy.is_known:
        raise AdmissionError(f"its guest policy {policy.bits:#x} has bits that this release does not support")
    wanted = (
        (rules.allow_smt or not policy.smt, "allows simultaneous multithreading"),
        (rules.allow_migration or not policy.migration, "allows a migration agent"),
        (rules.allow_cxl or not policy.cxl, "allows CXL memory"),
        (policy.single_socket or not rules.require_single_socket, "is not kept to a single socket"),
        (policy.ciphertext_hiding or not rules.require_ciphertext_hiding, "does not require ciphertext hiding"),
    )
    for is_met, text in wanted:
        if not is_met:
            raise AdmissionError(f"its guest policy {text}, against the rules: launch it with another guest policy")


def verify(proof: bytes, report_data: bytes, rules: Rules, now: float, *, known: Roots | None = None) -> Claims:
    """Verify a proof over `report_data`. `known` is for tests; a policy cannot set it. Raises AdmissionError."""
    report, certificate = decode(proof)
    # Cheap and not authenticated: stops replayed reports early.
    _check_report_data(SnpReport.decode(report), report_data)
    claims = authenticate(report, certificate, now, known=known, revoked=rules.revoked, listed=rules.listed)
    check(claims, rules)
    _check_report_data(claims.report, report_data)  # the check that counts, on the verified report
    return claims


def _check_report_data(report: SnpReport, report_data: bytes) -> None:
    if not keys.same(report.report_data, report_data):
        raise AdmissionError("the report was made for another connection or another worker (REPORT_DATA differs)")


# -- encoding -------------------------------------------------------------------------------------------------------


def encode(report: bytes, certificate: bytes) -> bytes:
    return encoding.blob(report) + encoding.blob(certificate)


def decode(proof: bytes) -> tuple[bytes, bytes]:
    """Decode a proof to report and certificate. Raises AdmissionError."""
    reader = encoding.Reader(proof)
    try:
        report, certificate = reader.blob(REPORT_BYTES), reader.blob(LEAF_BYTES)
        reader.end()
    except ProtocolError as error:
        raise AdmissionError(f"the SEV-SNP proof is malformed: {error}") from None
    return report, certificate


def verifier(rules: Rules, clock: Clock, *, known: Roots | None = None) -> AttestationVerifier[Rules]:
    """Return the verifier of SEV-SNP reports by the rules of one table. `known` is for tests."""
    return AttestationVerifier(KIND, NAME, rules, clock, partial(verify, known=known), roots=roots_content(known))
