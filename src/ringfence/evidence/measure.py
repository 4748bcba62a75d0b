"""From evidence in hand to the values that a policy wants: what stands here is what the reader of that table reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from ringfence.admission.proofs import golden, nvidia, tdx, tdx_quote
from ringfence.admission.proofs.snp_report import Product, Report


def snp_table(report: Report, products: Sequence[Product], provider: str | None) -> str:
    """[admit.snp] that admits this guest. `products`: the line that it runs on, or those that it may run on."""
    lines = ["[admit.snp]", f'measurement = "{report.measurement.hex()}"']
    if report.policy.debug:
        lines.insert(0, "# its host may debug this guest: no policy admits it")
    if report.vmpl:
        lines.append(f"vmpl = {report.vmpl}")
    if provider is not None:
        lines.append(f"vlek_providers = {json.dumps(provider)}")
    if report.policy.migration:
        lines.append("allow_migration = true")
    if report.policy.cxl:
        lines.append("allow_cxl = true")
    optional = (
        ("host_data", report.host_data),
        ("id_key_digest", report.id_key_digest),
        ("author_key_digest", report.author_key_digest),
    )
    lines += [f'{name} = "{value.hex()}"' for name, value in optional if any(value)]
    if any(report.chip_id):
        lines.append(f'# chip_id = "{report.chip_id.hex()}"   # only this machine')
    lines.append("[admit.snp.minimum_tcb]")
    if len(products) > 1:
        lines.append("# the report does not say on which product line it was made: keep the line that is true")
    return "\n".join([*lines, *(_minimum(each, report) for each in products), ""])


def _minimum(product: Product, report: Report) -> str:
    parts = ", ".join(f"{part} = {value}" for part, value in product.tcb(report.reported_tcb).parts)
    return f"{product.name} = {{ {parts} }}"


def tdx_table(body: tdx_quote.Body, fmspc: str) -> str:
    """[admit.tdx] that admits this TD."""
    lines = ["[admit.tdx]", f'collateral = "{fmspc}.json"   # `ringfence evidence collateral` fetches it']
    if body.is_debug or body.is_migratable or any(body.mr_service_td) or not body.has_sept_ve_disabled:
        lines.insert(0, "# its host may debug, disturb or migrate this TD: no policy admits it")
    lines.append(f'mrtd = "{body.mrtd.hex()}"')
    lines += [f'{name} = "{value.hex()}"' for name, value in zip(tdx.REGISTERS, body.rtmrs, strict=True)]
    optional = (
        ("mr_config_id", body.mr_config_id),
        ("mr_owner", body.mr_owner),
        ("mr_owner_config", body.mr_owner_config),
    )
    return "\n".join([*lines, *(f'{name} = "{value.hex()}"' for name, value in optional if any(value)), ""])


def golden_files(claims: Iterable[nvidia.Claims]) -> list[str]:
    """A file of golden values for each model, driver and VBIOS among some GPUs."""
    return list(dict.fromkeys(golden.write(each.golden()) for each in claims))
