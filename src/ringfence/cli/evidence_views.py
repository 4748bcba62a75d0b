"""The claims of evidence, for people and scripts: one view for each kind, verified, or with the reason why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ringfence.admission.policy_file.policy_file import PolicyFile
from ringfence.admission.proofs import azure, nvidia, snp, tdx, tdx_quote
from ringfence.admission.proofs.snp_report import Product, SnpReport, Tcb
from ringfence.admission.proofs.tdx_collateral import Collateral, check_agreement
from ringfence.errors import AdmissionError, ConfigurationError
from ringfence.evidence import measure
from ringfence.evidence.evidence_file import StoredEvidence


@dataclass(frozen=True)
class View:
    """The claims by name, and the reference values as text for a policy."""

    title: str
    claims: dict[str, str | list[str]]
    toml: str
    why_not_verified: str = ""


def look(held: StoredEvidence, report_data: bytes, collateral: Mapping[str, bytes], now: float) -> View:
    """Verify evidence, whatever it claims. Raises AdmissionError if it does not verify."""
    if held.kind == "nvidia":
        return _gpus(held, report_data, now)
    if held.kind in ("azure_snp", "azure_tdx"):
        return _look_azure(held, report_data, collateral, now)
    if held.kind == "snp":
        claims = snp.authenticate(*snp.decode(held.proof), now)
        found, view = claims.report.report_data, _snp(claims.report, (claims.product,), claims.tcb, claims.provider)
    else:
        verified = tdx.authenticate(held.proof, _parse(collateral), now)
        found, view = verified.body.report_data, _tdx(verified.body, verified.fmspc, verified)
    if found != report_data:
        raise AdmissionError(f"the evidence is genuine, but signs other report data than expected: {found.hex()}")
    return view


def look_unverified(held: StoredEvidence, collateral: Mapping[str, bytes]) -> View | None:
    """Return the claims of evidence for which collateral or certificate is missing; None if it can be verified."""
    if held.kind == "tdx" and not collateral:
        view = _tdx(tdx_quote.read(held.proof), _fmspc(held.proof), None)
        return replace(view, why_not_verified="no --collateral was given")
    if held.kind == "azure_tdx" and not collateral:
        quote, attestation = azure.decode_tdx(held.proof)
        guest = azure.read_guest(attestation, azure.nonce_of(held.report_data))
        view = _tdx(tdx_quote.read(quote), _fmspc(quote), None, held.kind)
        return replace(_azure(view, guest, held.kind), why_not_verified="no --collateral was given")
    if held.kind == "snp":
        report, certificate = snp.decode(held.proof)
        if not certificate:
            shown = SnpReport.decode(report)
            return replace(_snp(shown, shown.products, None, None), why_not_verified="no --certificate was given")
    return None


def _fmspc(quote: bytes) -> str:
    try:
        found: str = tdx.asked(tdx.load_library().parse_quote, quote).fmspc()
    except ValueError as error:
        raise AdmissionError(f"the quote cannot be read: {error}") from None
    return found.lower()


def verify(held: StoredEvidence, report_data: bytes, policy: PolicyFile, now: float) -> tuple[View, int]:
    """Evaluate a policy. Returns the first rule whose table for this kind is met, counted from 1.

    Raises AdmissionError with the reason of each rule if none is.
    """
    reasons = []
    for number, rule in enumerate(policy.rules, 1):
        for kind, rules in rule.proofs:
            if kind != held.kind:
                continue
            try:
                return _verify(held, report_data, rules, now), number
            except AdmissionError as error:
                reasons.append(f"rule {number}: {error}")
    if not reasons:
        raise AdmissionError(f"no rule of the policy requires {held.kind}")
    raise AdmissionError("; ".join(reasons))


def _verify(held: StoredEvidence, report_data: bytes, rules: object, now: float) -> View:
    if isinstance(rules, tdx.Rules):
        claims = tdx.verify(held.proof, report_data, rules, now)
        return _tdx(claims.body, claims.fmspc, claims)
    if isinstance(rules, snp.Rules):
        found = snp.verify(held.proof, report_data, rules, now)
        return _snp(found.report, (found.product,), found.tcb, found.provider)
    if isinstance(rules, azure.Rules):
        return _verify_azure(held, report_data, rules, now)
    assert isinstance(rules, nvidia.Rules)
    if held.other_nonce:
        raise ConfigurationError("another tool collected this evidence with its own nonce: no worker could present it")
    nvidia.verify(held.proof, report_data, rules, now)
    return _gpus(held, report_data, now)


# -- one kind each --------------------------------------------------------------------------------------------------


def _snp(
    report: SnpReport, products: Sequence[Product], tcb: Tcb | None, provider: str | None, table: str = "snp"
) -> View:
    names = " or ".join(product.name.capitalize() for product in products) or "an unknown processor"
    policy = report.policy
    allowed = [name for name in ("debug", "migration", "smt", "cxl") if getattr(policy, name)]
    claims: dict[str, str | list[str]] = {
        "product": names,
        "report version": str(report.version),
        "endorsed by": "VCEK of its chip" if provider is None else f"VLEK of {provider}",
        "measurement": report.measurement.hex(),
        "report data": report.report_data.hex(),
        "guest policy": f"{policy.bits:#x}: allows {', '.join(allowed) or 'nothing'}",
        "vmpl": str(report.vmpl),
        "memory aliases": "checked, none found" if report.has_checked_aliases else "not reported",
        "mitigations": f"{report.launch_mitigations:#x} at launch, {report.current_mitigations:#x} now",
        "chip": report.chip_id.hex(),
    }
    if tcb is not None:
        claims["tcb"] = str(tcb)
    return View(f"SEV-SNP report from {names}", claims, measure.snp_table(report, products, provider, table))


def _tdx(body: tdx_quote.Body, fmspc: str, verified: tdx.Claims | None, table: str = "tdx") -> View:
    claims: dict[str, str | list[str]] = {"platform (FMSPC)": fmspc}
    if verified is not None:
        claims["tcb status"] = verified.status
        if verified.advisories:
            claims["advisories"] = list(verified.advisories)
    claims["mrtd"] = body.mrtd.hex()
    claims |= {name: value.hex() for name, value in zip(tdx.REGISTERS, body.rtmrs, strict=True)}
    claims["attributes"] = f"{body.attributes:#x}" + (": DEBUG" if body.is_debug else "")
    claims["report data"] = body.report_data.hex()
    return View("TDX quote", claims, measure.tdx_table(body, fmspc, table))


def _look_azure(held: StoredEvidence, report_data: bytes, collateral: Mapping[str, bytes], now: float) -> View:
    nonce = held.other_nonce or azure.nonce_of(report_data)
    if held.kind == "azure_snp":
        report, certificate, attestation = azure.decode_snp(held.proof)
        guest = azure.read_guest(attestation, nonce)
        claims = snp.authenticate(report, certificate, now)
        azure.check_covered(claims.report.report_data, attestation)
        view = _snp(claims.report, (claims.product,), claims.tcb, claims.provider, held.kind)
    else:
        quote, attestation = azure.decode_tdx(held.proof)
        guest = azure.read_guest(attestation, nonce)
        verified = tdx.authenticate(quote, _parse(collateral), now)
        azure.check_covered(verified.body.report_data, attestation)
        view = _tdx(verified.body, verified.fmspc, verified, held.kind)
    return _azure(view, guest, held.kind)


def _verify_azure(held: StoredEvidence, report_data: bytes, rules: azure.Rules, now: float) -> View:
    nonce = azure.nonce_of(report_data)
    if held.kind == "azure_snp":
        found, guest = azure.verify_snp(held.proof, nonce, rules, now)
        view = _snp(found.report, (found.product,), found.tcb, found.provider, held.kind)
    else:
        claims, guest = azure.verify_tdx(held.proof, nonce, rules, now)
        view = _tdx(claims.body, claims.fmspc, claims, held.kind)
    return _azure(view, guest, held.kind)


def _azure(view: View, guest: azure.Guest, kind: str) -> View:
    """Add the claims of the vTPM to those of the paravisor."""
    claims: dict[str, str | list[str]] = {
        "vm id": guest.runtime.vm_id,
        "secure boot": "on" if guest.runtime.has_secure_boot else "off",
        "vtpm firmware": guest.quote.firmware_version.hex(),
        **{f"pcr {index}": value.hex() for index, value in enumerate(guest.pcrs)},
    }
    toml = view.toml + measure.pcrs_table(guest.pcrs, kind)
    if not guest.runtime.has_secure_boot:
        toml = toml.replace(f"[admit.{kind}]\n", f"[admit.{kind}]\nrequire_secure_boot = false\n", 1)
    return replace(
        view, title=f"{view.title} of Azure's paravisor, with its vTPM", claims=view.claims | claims, toml=toml
    )


def _gpus(held: StoredEvidence, report_data: bytes, now: float) -> View:
    nonce = held.other_nonce or nvidia.nonce_of(report_data)
    claims = [nvidia.verify_report(gpu, nonce, now) for gpu in nvidia.decode(held.proof)]
    lines: dict[str, str | list[str]] = {
        each.device: f"{each.model}, driver {each.driver}, VBIOS {each.vbios}, {len(each.measurements)} measurements"
        for each in claims
    }
    files = measure.reference_value_files(each for each in claims if each.driver is not None)
    toml = files[0] if len(files) == 1 else "".join(f"# -- file {n}\n{text}" for n, text in enumerate(files, 1))
    return View(f"evidence of {len(claims)} NVIDIA device{'s' * (len(claims) > 1)}", lines, toml)


def _parse(collateral: Mapping[str, bytes]) -> tuple[Collateral, ...]:
    """Parse collateral, given by file name."""
    if not collateral:
        raise ConfigurationError("a TDX quote cannot be verified without Intel's collateral: name it with --collateral")
    try:
        found = tuple(Collateral.parse(content, name) for name, content in collateral.items())
        check_agreement(found)
        return found
    except ValueError as error:
        raise ConfigurationError(f"--collateral: {error}") from None
