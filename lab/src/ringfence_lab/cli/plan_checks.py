"""The output of `plan validate`, `published` and `table`: the model beside measurements, publications and the runtime."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ringfence.cli.terminal import table, wrap
from ringfence_lab.cli.plan_views import seconds_text, share_text

if TYPE_CHECKING:
    from ringfence_lab.plan.gpu_tee import Line as TeeLine
    from ringfence_lab.plan.selection_table import Difference
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


def published_json() -> dict[str, Any]:
    from ringfence_lab.plan import published

    return {
        "lee": {
            "published": published.PUBLISHED,
            "calibrated": [{**asdict(each), "decisive": each.decisive} for each in published.calibrated()],
            "predicted": [asdict(each) for each in published.gpt2_xl()],
            "copies_only": [asdict(each) for each in published.copies_only()],
        },
        "fastrack": {"inputs": published.FASTRACK_INPUTS, "predicted": [asdict(each) for each in published.fastrack()]},
    }


def calibrated_rows() -> list[list[str]]:
    """Published slowdowns beside the planner's, before and after calibration, and the simulated ones."""
    from ringfence_lab.plan import published

    rows = [["slowdown on four GPUs", "published", "before", "calibrated", "simulated", "distance", "decided by"]]
    for each in published.calibrated():
        half, twice = each.inputs[each.decisive]
        simulated = "" if each.simulated is None else f"{each.simulated:.1f}"
        row = [each.what, f"{each.published}", f"{each.before:.2f}", f"{each.after:.1f}", simulated]
        row.append(published.times_text(each.after / each.published))
        rows.append([*row, f"{each.decisive}: {half:.1f} at half of it, {twice:.1f} at twice"])
    return rows


def tee_rows(found: Sequence[TeeLine]) -> list[list[str]]:
    """Predictions of gpu-tee cells, each by a profile that was calibrated without the cell."""
    rows = [
        ["cell", "variant", "over plain", "h100-cc", "calibrated", "measured", "h100-cc over it", "calibrated over it"]
    ]
    for line in found:
        ratios = [f"{ratio:.2f}" for ratio in (line.measured_ratio, line.before_ratio, line.after_ratio)]
        times = [f"{seconds / line.measured:.3f}" for seconds in (line.before, line.after)]
        rows.append([line.cell, line.variant, *ratios, seconds_text(line.measured), *times])
    return rows


def tee_text(found: Sequence[TeeLine]) -> str:
    """Lay out the predictions of gpu-tee cells and their errors."""
    head, *others = tee_rows(found)
    lines: list[str] = []
    body = table([head[1:], *(row[1:] for row in others)]).split("\n")
    for number, row in enumerate(others):
        if not number or others[number - 1][0] != row[0]:
            lines.append(row[0])
        lines.append(f"  {body[number + 1]}")
    return "\n".join([f"  {body[0]}", *lines, "", *map(wrap, tee_summary(found))])


def tee_summary(found: Sequence[TeeLine]) -> list[str]:
    """Return the median and the worst error of each variant."""
    result = [
        "h100-cc: each GPU in a machine of its own, as predicted before. calibrated: by the other half of the cells."
    ]
    for variant in dict.fromkeys(line.variant for line in found):
        errors = sorted(abs(line.error) for line in found if line.variant == variant)
        median, worst = share_text(statistics.median(errors)), share_text(errors[-1])
        result.append(f"{variant}: error of the seconds in {len(errors)} cells, median {median}, worst {worst}")
    return result


def lee_rows() -> list[list[str]]:
    """The planner's own costs of the published setting, and how far they are from what was published."""
    from ringfence_lab.plan import published

    rows = [["samples a GPU", "plain step", *_BUCKETS]]
    for each in published.gpt2_xl():
        rows.append([str(each.samples), seconds_text(each.plain), *_background(each.slowdown)])
    return rows


def copies_rows() -> list[list[str]]:
    """Host-device copies only, over baselines on other links; and what such a copy would have to cost."""
    from ringfence_lab.plan import published

    rows = [["samples a GPU", "baseline", "plain step", *_BUCKETS, "overhead implied", "rate implied"]]
    for each in published.copies_only():
        overhead, rate = each.implied
        link = f"{each.link}, {published.PLAIN_LINKS[each.link] / 1e9:.0f} GB/s"
        row = [str(each.samples), link, seconds_text(each.plain), *_background(each.slowdown)]
        rows.append([*row, seconds_text(overhead), f"{rate / 1e9:.0f} GB/s"])
    return rows


_BUCKETS = ("default buckets", "published", "distance", "one bucket", "published", "distance")


def _background(slowdown: dict[str, float]) -> list[str]:
    from ringfence_lab.plan.published import PUBLISHED, distance

    return [
        text
        for name in ("default", "enlarged")
        for text in (f"{slowdown[name]:.2f}", f"{PUBLISHED[name]}", distance(slowdown[name], name))
    ]


def published_text() -> str:
    """Predictions beside publications, and what had to be assumed."""
    from ringfence_lab.plan import hardware, published

    steps = [["Fastrack's fixes, one by one", "s/GB", "over plain copy", "time saved"]]
    for stage in published.fastrack():
        steps.append([stage.name, f"{stage.seconds_per_gb:.3f}", f"{stage.slowdown:.1f}", share_text(stage.reduction)])
    assumed = [
        f"  {key}: {why}"
        for key, why in hardware.load("h100-cc").assumed().items()
        if key.startswith(("device", "comp"))
    ]
    inputs = [f"  {name}: {what}" for name, what in published.FASTRACK_INPUTS.items()]
    said = published.PUBLISHED
    return "\n".join(
        [
            wrap("GPT-2 XL on four GPUs, every hop sealed, over the plain step (Lee et al., arXiv 2501.11771 v3; "
            f"abstract read). Published: {said['default']} with default buckets, {said['enlarged']} with enlarged ones."),
            "", wrap("Calibrated with simulated GPU TEEs (profile h100-cc-node): the GPUs of one machine, whose plaintext goes "
            "over NVLink. before: the profile h100-cc. simulated: `ringfence study --grid gpu-tee`, of steps that are cut:"),
            table(_short(calibrated_rows())),
            *_decided(),
            "", wrap("Before. The baseline is plaintext through the hosts and their network, as in the profile h100-cc:"),
            table(_without_published(lee_rows())),
            "", wrap("Host-device copies only: no network, no sealing. The baseline's GPUs talk over a link of their own:"),
            *_by_link(_without_published(copies_rows())),
            wrap("implied: the overhead and the rate of a host-device copy for which both published figures would hold"),
            "", table(steps),
            wrap("published (abstract read): communication 12.69 to 33.53 times the plain one; up to 84.6 % less run time"),
            "", "assumed:", *(wrap(line.strip(), "  ", "    ") for line in (*assumed, *inputs)),
        ]
    )  # fmt: skip


def _short(rows: list[list[str]]) -> list[list[str]]:
    """The rows without what decides, which is long."""
    return [[text.replace(" times", "x") for text in row[:-1]] for row in rows]


def _decided() -> list[str]:
    return [wrap(f"{row[0]}: decided by {row[-1]}", rest="  ") for row in calibrated_rows()[1:]]


def _by_link(rows: list[list[str]]) -> list[str]:
    """One table for each link of the baseline, which is the second column."""
    head, *others = rows
    lines = []
    for link in dict.fromkeys(row[1] for row in others):
        chosen = [[row[0], *row[2:]] for row in others if row[1] == link]
        lines += [f"{link}:", table([[head[0], *head[2:]], *chosen])]
    return lines


def _without_published(rows: list[list[str]]) -> list[list[str]]:
    """The rows without the published figures, which are the same in all of them."""
    kept = [index for index, title in enumerate(rows[0]) if title != "published"]
    return [[row[index].replace(" times", "x") for index in kept] for row in rows]


def table_json(proposed: Any, found: Sequence[Difference]) -> dict[str, Any]:
    from ringfence_lab.plan.selection_table import DEFAULT

    return {"default": asdict(DEFAULT), "proposed": asdict(proposed), "differences": [asdict(each) for each in found]}


def table_text(proposed: Any, found: Sequence[Difference]) -> str:
    from ringfence_lab.plan.selection_table import DEFAULT

    rows = [["threshold", "default", "by the model"]]
    mine, default = asdict(proposed), asdict(DEFAULT)
    rows += [[name, f"{default[name]:,}", f"{mine[name]:,}"] for name in default]
    where = [["collective", "workers", "bytes", "default", "by the model", "saves"]]
    where += [
        [d.collective, f"{d.workers:,}", f"{d.bytes:,}", d.default, d.proposed, share_text(d.gain)] for d in found
    ]
    return f"{table(rows)}\n\n{table(where) if found else 'both choose the same everywhere'}"
