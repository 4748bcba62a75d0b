"""What `ringfence plan` prints of the model itself: against measurements, publications and the runtime's own table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ringfence.cli.plan_views import seconds_text, share_text, table_of

if TYPE_CHECKING:
    from ringfence.lab.plan.selection_table import Difference
    from ringfence.lab.plan.validate import Validation


def validation_text(found: Validation) -> str:
    """All predictions, those that are scored marked, and what they come to."""
    rows = [["cell", "variant", "scored", "measured", "predicted", "error", "ratio", "predicted", "error"]]
    for line in found.lines:
        rows.append(
            [
                line.cell,
                line.variant,
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
    head = f"{found.cells} cells, {found.scored_cells} scored (Gloo within 10 % of itself); each predicted from the other half"
    rows = [["error", "scored cells", "ratio to Gloo: median", "worst", "seconds: median", "worst"]]
    rows += [
        [name, str(count), *map(share_text, (*ratio, *seconds))] for name, count, ratio, seconds in verified(found)
    ]
    return f"{head}\n{table_of(rows)}"


Verified = tuple[str, int, tuple[float, float], tuple[float, float]]


def verified(found: Validation) -> list[Verified]:
    """Collectives and steps apart: who predicts, over how many cells, how far off in ratios and in seconds.

    Much of a step is computing, which is an input. So beside the model stands whoever takes communication for free.
    """
    rows: list[Verified] = []
    if count := found.scored_of(steps=False):
        rows.append(("collectives", count, found.errors(True, steps=False), found.errors(False, steps=False)))
    if count := found.scored_of(steps=True):
        rows.append(("steps", count, found.errors(True, steps=True), found.errors(False, steps=True)))
        rows.append(("steps, were communication free", count, found.free_errors(True), found.free_errors(False)))
    return rows


def published_json() -> dict[str, Any]:
    from ringfence.lab.plan import published

    return {
        "lee": {
            "published": published.PUBLISHED,
            "predicted": [asdict(each) for each in published.gpt2_xl()],
            "crossings_only": [asdict(each) for each in published.crossings_only()],
        },
        "fastrack": {"inputs": published.FASTRACK_INPUTS, "predicted": [asdict(each) for each in published.fastrack()]},
    }


def lee_rows() -> list[list[str]]:
    """The planner's own prices of the published setting, and how far they are from what was published."""
    from ringfence.lab.plan import published

    rows = [["samples a GPU", "plain step", *_BUCKETS]]
    for each in published.gpt2_xl():
        rows.append([str(each.samples), seconds_text(each.plain), *_background(each.slowdown)])
    return rows


def crossings_rows() -> list[list[str]]:
    """Crossings only, over baselines on other links; and what a crossing would have to cost."""
    from ringfence.lab.plan import published

    rows = [["samples a GPU", "baseline", "plain step", *_BUCKETS, "toll implied", "rate implied"]]
    for each in published.crossings_only():
        toll, rate = each.implied
        link = f"{each.link}, {published.PLAIN_LINKS[each.link] / 1e9:.0f} GB/s"
        row = [str(each.samples), link, seconds_text(each.plain), *_background(each.slowdown)]
        rows.append([*row, seconds_text(toll), f"{rate / 1e9:.0f} GB/s"])
    return rows


_BUCKETS = ("default buckets", "published", "distance", "one bucket", "published", "distance")


def _background(slowdown: dict[str, float]) -> list[str]:
    from ringfence.lab.plan.published import PUBLISHED, distance

    return [
        text
        for name in ("default", "enlarged")
        for text in (f"{slowdown[name]:.2f}", f"{PUBLISHED[name]}", distance(slowdown[name], name))
    ]


def published_text() -> str:
    """Predictions beside publications, and what had to be assumed."""
    from ringfence.lab.plan import hardware, published

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
            "", "the model; its baseline is plaintext through the hosts and their network, as the profile h100-cc has it:",
            table_of(lee_rows()),
            "", "crossings only: no network, no sealing; against baselines whose GPUs talk over a link of their own:",
            table_of(crossings_rows()),
            "implied: the toll and the rate of a crossing that would make both published figures true at once",
            "", table_of(steps),
            "published (abstract read): communication 12.69 to 33.53 times the plain one; up to 84.6 % less run time",
            "", "assumed:", *assumed, *inputs,
        ]
    )  # fmt: skip


def table_json(proposed: Any, found: Sequence[Difference]) -> dict[str, Any]:
    from ringfence.lab.plan.selection_table import DEFAULT

    return {"default": asdict(DEFAULT), "proposed": asdict(proposed), "differences": [asdict(each) for each in found]}


def table_text(proposed: Any, found: Sequence[Difference]) -> str:
    from ringfence.lab.plan.selection_table import DEFAULT

    rows = [["threshold", "default", "by the model"]]
    mine, default = asdict(proposed), asdict(DEFAULT)
    rows += [[name, f"{default[name]:,}", f"{mine[name]:,}"] for name in default]
    where = [["collective", "workers", "bytes", "default", "by the model", "saves"]]
    where += [
        [d.collective, f"{d.workers:,}", f"{d.bytes:,}", d.default, d.proposed, share_text(d.gain)] for d in found
    ]
    return f"{table_of(rows)}\n\n{table_of(where) if found else 'both choose the same everywhere'}"
