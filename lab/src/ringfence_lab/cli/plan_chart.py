"""Draws a sweep: seconds a step by the number of workers, sealed and in the clear."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.errors import ConfigurationError

if TYPE_CHECKING:
    from ringfence_lab.plan.hardware import Hardware
    from ringfence_lab.plan.recommend import Plan

# Okabe and Ito's colours with a marker each: told apart without colour, and on paper.
_LOOKS = {
    "plaintext": ("plaintext, same schedules", "#000000", "o", "-"),
    "ringfence": ("ringfence", "#0072B2", "s", "-"),
    "tuned": ("ringfence, as recommended today", "#009E73", "^", "--"),
    "hop-by-hop": ("sealed hop by hop", "#D55E00", "D", ":"),
}


def draw(profile: Hardware, plans: Sequence[Plan], path: Path) -> None:
    """Write the picture to `path`, whose ending says in which format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workers = [plan.question.workers for plan in plans]
    lines = {name: [plan.variants[name].seconds for plan in plans] for name in ("plaintext", "ringfence", "hop-by-hop")}
    lines["tuned"] = [plan.tuned["ringfence"].seconds for plan in plans]
    with matplotlib.rc_context({"svg.hashsalt": "ringfence", "svg.fonttype": "none", "font.size": 10}):
        figure, axis = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
        for name, (label, colour, marker, dashes) in _LOOKS.items():
            axis.plot(workers, lines[name], color=colour, marker=marker, ls=dashes, label=label, markersize=5)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xticks(workers, [f"{count:,}" for count in workers], rotation=45)
        axis.set_xlabel("workers")
        axis.set_ylabel("seconds a step, predicted")
        question = plans[0].question
        axis.set_title(f"{question.model.name}, {question.samples} samples a worker\n{profile.title}", fontsize=10)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=9)
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=120)
        except OSError as error:
            raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error
        finally:
            pyplot.close(figure)
