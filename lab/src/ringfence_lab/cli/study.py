"""`ringfence study`: what sealing costs here, by model, workers, buckets, wire type and network, as tables that stay."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.cli import requirements
from ringfence.cli.further_commands import LAB
from ringfence.cli.terminal import Commands, wrap
from ringfence.errors import ConfigurationError
from ringfence_lab.bench import names

if TYPE_CHECKING:
    from ringfence_lab.study.cells import Cell
    from ringfence_lab.study.folder import Folder
    from ringfence_lab.study.runner import CellRounds

DESCRIPTION = """\
Measure a grid of cells (models, workers, bucket sizes, wire types, variants, networks) and keep two layers of results:

  raw/<cell>.jsonl      rounds as they were measured, append-only
  summary/cells.json    a row for each cell and variant, with intervals

It can be stopped at any time, also with kill -9: the same command continues where it was stopped, and measures nothing if no
round is missing. After a change of the machine or of the measured code it measures again; until all new rounds of a cell
exist, its old ones are shown. Variants are those of `ringfence bench`, and `alone`: the same step without communication.
"""

EXAMPLES = """\
examples:
  ringfence study --list                                    what would be measured, and for how long
  ringfence study                                           20 minutes on two cores; without root, no limited links
  ringfence study --quick                                   all kinds of cells in a minute
  ringfence study --grid mine.toml --results mine           a grid of your own
  ringfence study --grid machines --results machines        machines x workers, shared memory inside; needs root
  ringfence study --grid gpu-tee --results tee              what GPU TEEs cost, on simulated ones; about 20 minutes
"""

_FOLDER = Path("study-results")
_ELSEWHERE = "as measured on another machine or with other code"


def add_to(commands: Commands) -> None:
    """Add `study` and `study rebuild` to the command line."""
    study = commands.add_parser(
        "study",
        help=LAB["study"],
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    grid = study.add_mutually_exclusive_group()
    grid.add_argument(
        "--grid",
        type=Path,
        metavar="FILE",
        help="a grid of your own, in TOML, or one that is built in: "
        "default, quick, machines, machines-few, gpu-tee, gpu-tee-ringfence or gpu-tee-published",
    )
    grid.add_argument("--quick", action="store_true", help="a small grid: about a minute")
    study.add_argument("--list", action="store_true", help="print the cells and an estimate, and measure nothing")
    _add_folder(study, _FOLDER)
    study.set_defaults(run=run_study)
    verbs = study.add_subparsers(title="without measuring", metavar="VERB")
    rebuild = verbs.add_parser("rebuild", help="make the summary from the raw samples again")
    _add_folder(rebuild, argparse.SUPPRESS)
    rebuild.set_defaults(run=run_rebuild)


def _add_folder(parser: argparse.ArgumentParser, default: object) -> None:
    parser.add_argument("--results", type=Path, default=default, metavar="DIR", help=f"default: {_FOLDER}")


def run_study(options: argparse.Namespace) -> int:
    """Run `ringfence study`."""
    from ringfence_lab.study import summary_table

    cells = _cells(options)
    if options.list:
        print(summary_table.listing(cells, len(os.sched_getaffinity(0))))
        return 0
    from ringfence_lab.bench import machine
    from ringfence_lab.study import runner
    from ringfence_lab.study.folder import Folder

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends workers and namespaces as Ctrl-C does
    folder, here = Folder(options.results), runner.facts()
    with folder.held(_command(options)):
        found = runner.missing_rounds(folder, cells, here)
        if back := runner.show([each for each in found if not each.rounds]):
            _say(
                f"{back} cells were shown {_ELSEWHERE}; all rounds of this machine and code exist and are selected again"
            )
        lacking = [each for each in found if each.rounds]
        missing = _possible(lacking)
        if missing:
            requirements.workers()
            _say(
                f"{sum(each.rounds for each in missing)} rounds of {len(missing)} cells are missing and will be measured"
            )
            if others := sum(each.others for each in missing):
                _say(f"{others} of them are shown {_ELSEWHERE} until all their new rounds exist")
            runner.measure(missing, here, _command(options))
        _rebuild(folder, nothing_new=not lacking)
    names_here, here_digest = {cell.name for cell in cells}, machine.digest(here)
    rows = json.loads(folder.summary.read_text(encoding="utf-8"))
    shown = [row for row in rows if row["cell"] in names_here and row["machine"] == here_digest]
    print(summary_table.summary(shown))
    report = "ringfence report" if options.results == _FOLDER else f"ringfence report --study {options.results}"
    print(f"\nresults: {folder.path}; `{report}` shows them")
    return 0


def _possible(missing: list[CellRounds]) -> list[CellRounds]:
    """Return the cells that this user can measure: the others need network namespaces."""
    from ringfence_lab.bench import netns

    here = [each for each in missing if not each.cell.settings["hosts"] or netns.available()]
    if len(here) < len(missing):
        _say(f"{len(missing) - len(here)} cells are skipped: network namespaces need root and iproute2 (ip, tc)")
    return here


def run_rebuild(options: argparse.Namespace) -> int:
    """Run `ringfence study rebuild`."""
    from ringfence_lab.study.folder import Folder

    folder = Folder(options.results)
    if not folder.raw_files():
        raise ConfigurationError(f"{folder.raw} contains no samples; measure some with `ringfence study`")
    with folder.held("ringfence study rebuild"):
        _rebuild(folder, nothing_new=False)
    return 0


def _rebuild(folder: Folder, nothing_new: bool) -> None:
    from ringfence_lab.study.summary import summarise

    if summarise(folder):
        _say("rebuilt: summary")
    else:
        _say(f"{'nothing to do: no round is missing, and ' * nothing_new}the summary is up to date")


def _cells(options: argparse.Namespace) -> list[Cell]:
    from ringfence_lab.study import grid

    name = "quick" if options.quick else "default" if options.grid is None else str(options.grid)
    if name in grid.BUILT_IN:
        return _without_missing_clocks(_without_missing_hosts(grid.built_in(name)))
    try:
        text = options.grid.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the grid {options.grid}: {error}") from None
    return _without_missing_clocks(_without_missing_hosts(grid.read(text, options.grid.name)))


def _without_missing_hosts(cells: list[Cell]) -> list[Cell]:
    """Return the cells without ringfence on simulated GPU TEEs if there can be no network namespaces."""
    from ringfence_lab.bench import netns
    from ringfence_lab.study import tee_grid
    from ringfence_lab.study.cells import TEE

    sealed = {
        cell.name for cell in cells if cell.settings["kind"] == TEE and names.TEE_SEALED in cell.settings["variants"]
    }
    if not sealed or netns.available():
        return cells
    _say(
        f"{names.TEE_SEALED} is left out of {len(sealed)} cells on simulated GPU TEEs: its hosts are network namespaces, "
        "which need root and iproute2 (ip, tc)"
    )
    found = [tee_grid.without_sealed(cell) if cell.name in sealed else cell for cell in cells]
    return list({cell.name: cell for cell in found}.values())


def _without_missing_clocks(cells: list[Cell]) -> list[Cell]:
    """Return the cells without the profiled variant if the data plane has no clocks."""
    from ringfence.dataplane import info

    profiled = [cell for cell in cells if names.PROFILED in cell.settings["variants"]]
    if not profiled or info.wanted() == "compiled":
        return cells
    _say(f"{names.PROFILED} is left out of {len(profiled)} cells: it needs the compiled data plane; {info.SLOWER}")
    return list({cell.name: cell for cell in (each.without(names.PROFILED) for each in cells)}.values())


def _command(options: argparse.Namespace) -> str:
    """Return the command line without paths of this machine: samples are published."""
    if options.grid is not None:
        return f"ringfence study --grid {options.grid.name}"
    return "ringfence study --quick" if options.quick else "ringfence study"


def _say(what: str) -> None:
    print(wrap(what), file=sys.stderr, flush=True)
