"""`ringfence report`: the page of a study, with its figures."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ringfence.cli.further_commands import LAB
from ringfence.cli.terminal import Commands

DESCRIPTION = """\
Make one HTML page from a study: the cost of sealing by model, workers, bucket size, rate and wire type, the stages that take
the time, and a table of all cells. Cells on simulated GPU TEEs get a page of their own,
gpu-tee.html. A page needs no network and no other file; the figures are also written as SVG and PNG.

The page lists figures for which the study has no numbers, with the reason. The same study gives the same page.
"""

EXAMPLES = """\
examples:
  ringfence study                        measure first
  ringfence report                       study-results/report/report.html
  ringfence report --study site-a --out site-a-report
  ringfence report --json                which files were written, and what is missing
"""


def add_to(commands: Commands) -> None:
    """Add `report` to the command line."""
    report = commands.add_parser(
        "report",
        help=LAB["report"],
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    report.add_argument(
        "--study", type=Path, default=Path("study-results"), metavar="DIR", help="default: study-results"
    )
    report.add_argument("--out", type=Path, metavar="DIR", help="default: the folder report in that of the study")
    report.add_argument("--json", action="store_true", help="print what was written as JSON")
    report.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `ringfence report`."""
    from ringfence_lab.report.write import FIGURES, write

    target = options.out or options.study / "report"
    done = write(options.study, target, lambda words: print(words, file=sys.stderr))
    names = [figure.name for figure in done.figures]
    if options.json:
        files = [str(target / FIGURES / f"{name}.{kind}") for name in names for kind in ("svg", "png")]
        missing = {each.name: each.why for each in done.missing}
        pages = {"page": str(done.pages[0]), "pages": [str(page) for page in done.pages]}
        print(json.dumps({**pages, "figures": files, "missing": missing}, indent=2))
        return 0
    for each in done.missing:
        print(f"not drawn: {each.title}: {each.why}")
    print(f"{len(names)} figures: {target / FIGURES}")
    for page in done.pages:
        print(f"page: {page}")
    return 0
