"""The output of `plan validate` and `published`: the model beside measurements and publications."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringfence.cli.terminal import table, wrap
from ringfence_lab.cli.plan_views import seconds_text, share_text

if TYPE_CHECKING:
    from ringfence_lab.plan.validate import Validation


def validation_text(found: Validation) -> str:
    """Lay out all predictions, cell by cell, and their errors."""
    rows = [["variant", "measured", "predicted", "error", "ratio", "predicted", "error"]]
    cells = []
    for line in found.lines:
        cells.append(f"{line.cell}, {'scored' if line.scored else 'not scored'}")
        rows.append(
            [
                f"  {line.variant}",
                seconds_text(line.measured),
                seconds_text(line.predicted),
                share_text(line.error),
                f"{line.measured_ratio:.2f}",
                f"{line.predicted_ratio:.2f}",
                share_text(line.ratio_error),
            ]
        )
    head, *lines = table(rows).split("\n")
    result = [head]
    for cell, before, text in zip(cells, ["", *cells], lines, strict=False):
        result += [cell, text] if cell != before else [text]
    return "\n".join(result) + f"\n\n{validation_summary(found)}"


def validation_summary(found: Validation) -> str:
    head = f"{found.cells} cells, {found.scored_cells} scored (Gloo within 10 % of itself); each predicted from the other half"
    rows = [["error", "scored cells", "ratio to Gloo: median", "worst", "seconds: median", "worst"]]
    rows += [
        [name, str(count), *map(share_text, (*ratio, *seconds))] for name, count, ratio, seconds in verified(found)
    ]
    return f"{wrap(head)}\n{table(rows)}"


Verified = tuple[str, int, tuple[float, float], tuple[float, float]]


def verified(found: Validation) -> list[Verified]:
    """Return the errors of collectives and of steps: what was predicted, over how many cells, in ratios and in seconds.

    Much of a step is computing, which is an input. The prediction without any communication is listed for comparison.
    """
    rows: list[Verified] = []
    if count := found.scored_of(steps=False):
        rows.append(("collectives", count, found.errors(True, steps=False), found.errors(False, steps=False)))
    if count := found.scored_of(steps=True):
        rows.append(("steps", count, found.errors(True, steps=True), found.errors(False, steps=True)))
        rows.append(("steps, were communication free", count, found.free_errors(True), found.free_errors(False)))
    return rows


def slowdown_rows() -> list[list[str]]:
    """Published slowdowns beside the planner's and the simulated ones, and the input that decides."""
    from ringfence_lab.plan import published

    rows = [["slowdown on four GPUs", "published", "predicted", "simulated", "distance", "decided by"]]
    for each in published.slowdowns():
        half, twice = each.inputs[each.decisive]
        times = each.predicted / each.published
        distance = f"{times:.1f} times above" if times >= 1 else f"{1 / times:.1f} times below"
        simulated = "" if each.simulated is None else f"{each.simulated:.1f}"
        row = [each.what, f"{each.published}", f"{each.predicted:.1f}", simulated, distance]
        rows.append([*row, f"{each.decisive}: {half:.1f} at half of it, {twice:.1f} at twice"])
    return rows


def published_text() -> str:
    """Predictions beside publications, and what had to be assumed."""
    from ringfence_lab.plan import hardware, published

    rows, assumed = slowdown_rows(), hardware.load(published.NODE).assumed()
    return "\n".join(
        [
            wrap(
                "Four GPUs of one machine, every hop sealed, over the plain step (Lee et al., arXiv 2501.11771 v3; abstract "
                f"read). predicted: profile {published.NODE}. simulated: `ringfence study --grid gpu-tee`, steps are cut."
            ),
            table([row[:-1] for row in rows]),
            *(wrap(f"{row[0]}: decided by {row[-1]}", rest="  ") for row in rows[1:]),
            "",
            "assumed:",
            *(
                wrap(f"{key}: {why}", "  ", "    ")
                for key, why in assumed.items()
                if key.startswith(("device", "comp"))
            ),
        ]
    )
