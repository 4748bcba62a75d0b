"""`ringfence study`: what sealing costs here, by model, workers, buckets, wire type and network, as tables that stay."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence.cli import LAB, requirements
from ringfence.cli.bench import interrupt
from ringfence.errors import ConfigurationError
from ringfence.lab.bench import names
from ringfence.lab.bench.units import bytes_of

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ringfence.lab.study.cells import Cell
    from ringfence.lab.study.folder import Folder
    from ringfence.lab.study.runner import Wanted

DESCRIPTION = """\
Measure a grid of cells (models, workers, bucket sizes, wire types, variants, networks) and keep three layers of results:

  raw/<cell>.jsonl        rounds as they were measured, append-only
  tidy/samples.parquet    a row for each round and variant
  summary/cells.parquet   a row for each cell and variant, with intervals (also as cells.json)

Stop it whenever you like, also with kill -9: the same command goes on where it was stopped, and when all is measured it
computes nothing. After a change of the machine or of the measured code it measures anew; a cell is shown as it was until
all its new rounds are there. Variants are those of `ringfence bench`, and `alone`: the same step without any communication.
"""

EXAMPLES = """\
examples:
  ringfence study --list                                    what would be measured, and for how long
  ringfence study                                           half an hour on two cores; without root, no limited links
  ringfence study --quick                                   a look at everything in a minute
  ringfence study --grid mine.toml --results mine           a grid of your own (docs/guides/study.md)
  ringfence study query --model gpt2 --workers 2            rows of the summary
  ringfence study query --variant ringfence --json        for a script, one row a line
"""

QUERY_DESCRIPTION = """\
Rows of the summary (or of the samples) whose columns have one of the values that you give. Values only ever are values: nothing
that you write here is run as a query.
"""

_FOLDER = Path("study-results")
_ELSEWHERE = "as measured on another machine or with other code"


def add_to(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `study`, `study rebuild` and `study query` to the command line."""
    study = commands.add_parser(
        "study",
        help=LAB["study"],
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    grid = study.add_mutually_exclusive_group()
    grid.add_argument(
        "--grid", type=Path, metavar="FILE", help="a grid of your own, in TOML; default: the one built in"
    )
    grid.add_argument("--quick", action="store_true", help="a small grid, few rounds: a minute")
    study.add_argument("--list", action="store_true", help="print the cells and an estimate, and measure nothing")
    _add_folder(study, _FOLDER)
    study.set_defaults(run=run_study)
    verbs = study.add_subparsers(title="without measuring", metavar="VERB")
    rebuild = verbs.add_parser("rebuild", help="make the tidy and the summary layer from the raw samples again")
    _add_folder(rebuild, argparse.SUPPRESS)
    rebuild.set_defaults(run=run_rebuild)
    _add_query(verbs)


def _add_query(verbs: _SubParsersAction[argparse.ArgumentParser]) -> None:
    query = verbs.add_parser("query", help="rows by model, workers, variant, …", description=QUERY_DESCRIPTION)
    for name, parse in _COLUMNS.items():
        query.add_argument(
            f"--{name.replace('_', '-')}",
            type=_listed(parse),
            dest=f"column_{_NAMES.get(name, name)}",
            metavar="VALUE,…",
            help="`none`: has no value" if name in ("bucket_mb", "rate") else None,
        )
    query.add_argument("--samples", action="store_true", help="rows of the tidy layer in place of the summary")
    query.add_argument("--json", action="store_true", help="one JSON object a line")
    _add_folder(query, argparse.SUPPRESS)
    query.set_defaults(run=run_query)


def _add_folder(parser: argparse.ArgumentParser, default: object) -> None:
    parser.add_argument("--results", type=Path, default=default, metavar="DIR", help=f"default: {_FOLDER}")


def run_study(options: argparse.Namespace) -> int:
    """Measure what is missing, make the layers, print the summary."""
    from ringfence.lab.study import summary_table

    cells = _cells(options)
    if options.list:
        print(summary_table.listing(cells, len(os.sched_getaffinity(0))))
        return 0
    from ringfence.lab.bench import machine
    from ringfence.lab.study import runner
    from ringfence.lab.study.folder import Folder

    signal.signal(signal.SIGTERM, interrupt)  # workers and namespaces are ended by the same way out as on Ctrl-C
    folder, here = Folder(options.results), runner.facts()
    with folder.held(_command(options)):
        wanted = runner.wanted(folder, cells, here)
        if back := runner.show([each for each in wanted if not each.rounds]):
            _say(
                f"{back} cells were shown {_ELSEWHERE}: all rounds of this machine and code are there, and shown again"
            )
        lacking = [each for each in wanted if each.rounds]
        missing = _possible(lacking)
        if missing:
            requirements.workers()
            _say(f"{sum(each.rounds for each in missing)} rounds of {len(missing)} cells are to be measured")
            if others := sum(each.others for each in missing):
                _say(f"{others} of them are shown {_ELSEWHERE}, each until all its new rounds are there")
            runner.measure(missing, here, _command(options))
        _rebuild(folder, nothing_new=not lacking)
    _print_summary(folder, {"cell": [cell.name for cell in cells], "machine": [machine.digest(here)]})
    print(f"\nlayers: {folder.path}; `ringfence study query` and `ringfence report` read them")
    return 0


def _possible(missing: list[Wanted]) -> list[Wanted]:
    """Without those that this user cannot measure: half an hour of the others is worth having."""
    from ringfence.lab.bench import netns

    here = [each for each in missing if not each.cell.settings["hosts"] or netns.available()]
    if len(here) < len(missing):
        _say(f"{len(missing) - len(here)} cells are left out: network namespaces need root and iproute2 (ip, tc)")
    return here


def run_rebuild(options: argparse.Namespace) -> int:
    """Make the layers from raw samples, wherever these were measured."""
    from ringfence.lab.study.folder import Folder

    folder = Folder(options.results)
    if not folder.raw_files():
        raise ConfigurationError(f"{folder.raw} holds no samples; `ringfence study` makes them")
    with folder.held("ringfence study rebuild"):
        _rebuild(folder, nothing_new=False)
    return 0


def _rebuild(folder: Folder, nothing_new: bool) -> None:
    from ringfence.lab.study.summary import summarise
    from ringfence.lab.study.tidy import tidy

    tidied, summarised = tidy(folder), summarise(folder)
    if nothing_new and not tidied and not summarised:
        _say("nothing new: all rounds were measured before, and both layers are what the samples make")
    else:
        made = [name for name, done in (("tidy", tidied), ("summary", summarised)) if done]
        _say(
            f"made again: {' and '.join(made)}"
            if made
            else "both layers are what the samples make; nothing was made again"
        )


def run_query(options: argparse.Namespace) -> int:
    """Print the rows that were asked for."""
    from ringfence.lab.study import query, summary_table
    from ringfence.lab.study.folder import Folder
    from ringfence.lab.study.schema import SUMMARY, TIDY

    asked = {
        name.removeprefix("column_"): values for name, values in vars(options).items() if name.startswith("column_")
    }
    wanted = {name: values for name, values in asked.items() if values is not None}
    folder = Folder(options.results)
    path, schema = (folder.tidy, TIDY) if options.samples else (folder.summary, SUMMARY)
    rows = query.rows(path, schema, wanted)
    if options.json:
        for row in rows:
            print(json.dumps(row, default=str))
        return 0
    found = list(rows)
    print(
        (summary_table.samples if options.samples else summary_table.summary)(found)
        if found
        else "no row has these values"
    )
    return 0


def _print_summary(folder: Folder, wanted: dict[str, Sequence[Any]]) -> None:
    from ringfence.lab.study import query, summary_table
    from ringfence.lab.study.schema import SUMMARY

    print(summary_table.summary(list(query.rows(folder.summary, SUMMARY, wanted))))


def _cells(options: argparse.Namespace) -> list[Cell]:
    from ringfence.lab.study import grid

    if options.grid is None:
        return _where_there_are_clocks(grid.built_in("quick" if options.quick else "default"))
    try:
        text = options.grid.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the grid {options.grid}: {error}") from None
    return _where_there_are_clocks(grid.read(text, options.grid.name))


def _where_there_are_clocks(cells: list[Cell]) -> list[Cell]:
    """Without the profiled variant where it has no clocks to read: all others are worth having."""
    from ringfence.dataplane import info

    profiled = [cell for cell in cells if names.PROFILED in cell.settings["variants"]]
    if not profiled or info.is_compiled():
        return cells
    _say(f"{names.PROFILED} is left out of {len(profiled)} cells: it needs the compiled data plane; {info.why_not()}")
    return list({cell.name: cell for cell in (each.without(names.PROFILED) for each in cells)}.values())


def _command(options: argparse.Namespace) -> str:
    """What was asked for, without paths of this machine: samples are meant to be shown."""
    if options.grid is not None:
        return f"ringfence study --grid {options.grid.name}"
    return "ringfence study --quick" if options.quick else "ringfence study"


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


# -- arguments --------------------------------------------------------------------------------------------------------


def _listed(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse_all(text: str) -> list[Any]:
        try:
            return [None if each == "none" else parse(each) for each in text.split(",")]
        except (ValueError, ConfigurationError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_all


def _rate(text: str) -> int:
    from ringfence.lab.bench.netns import bits_per_second

    return bits_per_second(text)


def _bool(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(f"{text!r}: write yes or no")
    return text == "yes"


_NAMES = {"rate": "rate_bits"}
_COLUMNS: dict[str, Callable[[str], Any]] = {
    "cell": str,
    "kind": str,
    "operation": str,
    "size": bytes_of,
    "model": str,
    "strategy": str,
    "device": str,
    "bucket_mb": float,
    "wire": str,
    "workers": int,
    "hosts": int,
    "rate": _rate,
    "busy": _bool,
    "variant": str,
    "machine": str,
    "source": str,
}
