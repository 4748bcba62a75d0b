"""What `ringfence plan` prints of the model itself: against measurements, publications and the runtime's own table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ringfence.cli.plan_views import seconds_text, share_text, table_of

if TYPE_CHECKING:
    from ringfence.plan.table import Difference
    from ringfence.plan.validate import Validation


def validation_text(found: Validation) -> str:
    """All predictions, those that are scored marked, and what they come to."""
    rows = [["cell", "contender", "scored", "measured", "predicted", "error", "ratio", "predicted", "error"]]
    for line in found.lines:
        rows.append(
            [
                line.cell,
                line.contender,
                "yes" if line.scored else "no",
                seconds_text(line.measured),
                seconds_text(line.predicted),
                share_text(line.error),
                f"{line.measured_ratio:.2f}",
                f"{line.predicted_ratio:.2f}",
                share_text(line.ratio_error),
            ]
        )
    return f"{table_of(rows)}\n\n{validation_summary(found)}"


def validation_summary(found: Validation) -> str:
    seconds, ratios = found.errors(ratios=False), found.errors(ratios=True)
    return (
        f"{found.cells} cells, {found.scored_cells} scored (Gloo within 10 % of itself); each predicted from the other half\n"
        f"ratio to Gloo: median error {share_text(ratios[0])}, worst {share_text(ratios[1])}\n"
        f"seconds:       median error {share_text(seconds[0])}, worst {share_text(seconds[1])}"
    )


def published_json() -> dict[str, Any]:
    from ringfence.plan import published

    return {
        "lee": {"published": published.PUBLISHED, "predicted": [asdict(each) for each in published.gpt2_xl()]},
        "fastrack": {"inputs": published.FASTRACK_INPUTS, "predicted": [asdict(each) for each in published.fastrack()]},
    }


def published_text() -> str:
    """Predictions beside publications, and what had to be assumed."""
    from ringfence.plan import hardware, published

    says = published.PUBLISHED
    rows = [
        [
            "samples, plain link",
            "plain step",
            "default buckets",
            "published",
            "one bucket",
            "published",
            "toll implied",
            "rate implied",
        ]
    ]
    for each in published.gpt2_xl():
        toll, rate = each.implied
        rows.append(
            [
                f"{each.samples}, {each.link}",
                seconds_text(each.plain),
                f"{each.slowdown['default']:.1f}",
                f"{says['default']}",
                f"{each.slowdown['enlarged']:.1f}",
                f"{says['enlarged']}",
                seconds_text(toll),
                f"{rate / 1e9:.0f} GB/s",
            ]
        )
    steps = [["Fastrack's fixes, one by one", "s/GB", "over plain copy", "time saved"]]
    for stage in published.fastrack():
        steps.append([stage.name, f"{stage.seconds_per_gb:.3f}", f"{stage.slowdown:.1f}", share_text(stage.reduction)])
    assumed = [
        f"  {key}: {why}"
        for key, why in hardware.load("h100-cc").assumed().items()
        if key.startswith(("cross", "comp"))
    ]
    inputs = [f"  {name}: {what}" for name, what in published.FASTRACK_INPUTS.items()]
    return "\n".join(
        [
            "GPT-2 XL on four GPUs, every hop sealed, over the plain step (Lee et al., arXiv 2501.11771 v3; abstract read)",
            table_of(rows),
            "implied: the toll and the rate of a crossing that would make both published figures true at once",
            "", table_of(steps),
            "published (abstract read): communication 12.69 to 33.53 times the plain one; up to 84.6 % less run time",
            "", "assumed:", *assumed, *inputs,
        ]
    )  # fmt: skip


def table_json(proposed: Any, found: Sequence[Difference]) -> dict[str, Any]:
    from ringfence.plan.table import DEFAULT

    return {"default": asdict(DEFAULT), "proposed": asdict(proposed), "differences": [asdict(each) for each in found]}


def table_text(proposed: Any, found: Sequence[Difference]) -> str:
    from ringfence.plan.table import DEFAULT

    rows = [["threshold", "default", "by the model"]]
    mine, default = asdict(proposed), asdict(DEFAULT)
    rows += [[name, f"{default[name]:,}", f"{mine[name]:,}"] for name in default]
    where = [["collective", "workers", "bytes", "default", "by the model", "saves"]]
    where += [
        [d.collective, f"{d.workers:,}", f"{d.bytes:,}", d.default, d.proposed, share_text(d.gain)] for d in found
    ]
    return f"{table_of(rows)}\n\n{table_of(where) if found else 'both choose the same everywhere'}"
