"""Writes policy tables and reference values from evidence, in the form that their readers accept."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Final

from ringfence.admission.proofs import nvidia, reference_values, tdx, tdx_quote
from ringfence.admission.proofs.snp_report import Product, SnpReport

_STATIC_PCRS: Final = 16  # the others can be reset, or are for debugging
_BOOT_PCRS: Final = {
    4: "boot loader",
    7: "secure boot",
    8: "commands of GRUB",
    9: "kernel and initrd",
    11: "unified kernel image",
    12: "kernel command line",
    14: "keys of shim (MOK)",
}
_TOML_BITS: Final = (1 << 63) - 1  # of a 64-bit vector: TOML's integers are signed


def snp_table(report: SnpReport, products: Sequence[Product], provider: str | None, name: str = "snp") -> str:
    """Return an [admit.snp] table that admits this guest. `products` are its possible product lines."""
    lines = [f"[admit.{name}]", f'measurement = "{report.measurement.hex()}"']
    if report.policy.debug:
        lines.insert(0, "# the host may debug this guest: no policy admits it")
    if report.vmpl:
        lines.append(f"vmpl = {report.vmpl}")
    if provider is not None:
        lines.append(f"vlek_providers = {json.dumps(provider)}")
    if report.policy.migration:
        lines.append("allow_migration = true")
    if report.policy.cxl:
        lines.append("allow_cxl = true")
    if _is_provisional(report):
        lines.append("allow_provisional_firmware = true   # the running firmware is not committed")
    if not report.has_checked_aliases:
        lines.append("require_alias_check = false   # the report does not confirm it (BadRAM)")
    optional = (
        ("host_data", report.host_data),
        ("id_key_digest", report.id_key_digest),
        ("author_key_digest", report.author_key_digest),
    )
    lines += [f'{name} = "{value.hex()}"' for name, value in optional if any(value)]
    if any(report.chip_id):
        lines += ["# to admit only this machine:", f'# chip_id = "{report.chip_id.hex()}"']
    lines.append(f"[admit.{name}.minimum_tcb]")
    if len(products) > 1:
        lines.append("# the report does not name its product line: keep the one that applies")
    lines += [_minimum(each, report) for each in products]
    mitigations = report.launch_mitigations & report.current_mitigations & _TOML_BITS
    if mitigations:
        lines.append(f"[admit.{name}.mitigations]")
        lines += [f"{each.name} = {mitigations:#x}" for each in products]
    return "\n".join([*lines, ""])


def _is_provisional(report: SnpReport) -> bool:
    versions = (report.current_version, report.committed_version)
    return report.current_tcb != report.committed_tcb or versions[0] != versions[1]


def _minimum(product: Product, report: SnpReport) -> str:
    """Return the lowest of all TCB versions that a minimum is compared with."""
    found = [product.tcb(raw).parts for raw in (report.reported_tcb, report.committed_tcb, report.launch_tcb)]
    parts = ", ".join(f"{part} = {min(dict(each)[part] for each in found)}" for part in product.tcb_parts)
    return f"{product.name} = {{ {parts} }}"


def tdx_table(body: tdx_quote.Body, fmspc: str, name: str = "tdx") -> str:
    """Return an [admit.tdx] table that admits this TD."""
    lines = [f"[admit.{name}]", f'collateral = "{fmspc}.json"   # `ringfence evidence collateral` fetches it']
    if body.is_debug or body.is_migratable or any(body.mr_service_td) or not body.has_sept_ve_disabled:
        lines.insert(0, "# the host may debug, disturb or migrate this TD: no policy admits it")
    lines.append(f'mrtd = "{body.mrtd.hex()}"')
    lines += [f'{name} = "{value.hex()}"' for name, value in zip(tdx.REGISTERS, body.rtmrs, strict=True)]
    optional = (
        ("mr_config_id", body.mr_config_id),
        ("mr_owner", body.mr_owner),
        ("mr_owner_config", body.mr_owner_config),
    )
    return "\n".join([*lines, *(f'{name} = "{value.hex()}"' for name, value in optional if any(value)), ""])


def pcrs_table(pcrs: Sequence[bytes], name: str) -> str:
    """Return the table with the PCRs of a guest on Azure: what it booted; others, which vary more, as comments."""
    lines = [f"[admit.{name}.pcrs]"]
    for index, value in enumerate(pcrs[:_STATIC_PCRS]):
        mark = "" if index in _BOOT_PCRS else "# "
        lines.append(f'{mark}{index} = "{value.hex()}"   # {_BOOT_PCRS.get(index, "varies with machine or disk")}')
    return "\n".join([*lines, ""])


def reference_value_files(claims: Iterable[nvidia.Claims]) -> list[str]:
    """Return a file of reference values for each combination of model, driver and VBIOS."""
    return list(dict.fromkeys(reference_values.write(each.reference_values()) for each in claims))
