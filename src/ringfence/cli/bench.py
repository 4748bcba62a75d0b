"""`ringfence bench`: what sealing costs on this machine, against plaintext Gloo in the same processes."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ringfence.bench import names
from ringfence.cli import bench_admission
from ringfence.errors import ConfigurationError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ringfence.bench.results import Result

DESCRIPTION = """\
Time collectives, or training steps, on plaintext Gloo, on ringfence and on other ways to seal. The contenders take turns
in the same worker processes; Gloo runs twice, and what it differs from itself is the resolution of the instrument.

Raw samples are appended to a folder. The same command goes on where it was stopped, and only prints when all is measured.
"""

CONTENDERS = "contenders:\n" + "\n".join(f"  {name:20} {what}" for name, what in names.CONTENDERS.items())

COLLECTIVES_EXAMPLES = """\

examples:
  ringfence bench collectives
  ringfence bench collectives --sizes 25MiB --workers 2 --profile
  ringfence bench collectives --ops all_gather,broadcast --sizes 25MiB --json
  ringfence bench collectives --sizes 25MiB --hosts 2 --rate 1gbit      between network namespaces; needs root
"""

TRAIN_EXAMPLES = """\

examples:
  ringfence bench train --models gpt2 --workers 2
  ringfence bench train --models gpt2 --workers 2 --bucket-mb 25,100
  ringfence bench train --models bert-base --workers 2 --strategy fsdp2
"""

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def add_to(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench collectives`, `bench train` and `bench admission` to the command line."""
    bench = commands.add_parser("bench", help="measure what sealing costs here", description=DESCRIPTION)
    kinds = bench.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    collectives = _add(kinds, "collectives", "single collectives by size", COLLECTIVES_EXAMPLES)
    collectives.add_argument("--ops", type=_listed(_name_of(names.OPERATIONS)), default=["all_reduce"], metavar="OP,…")
    collectives.add_argument(
        "--sizes",
        type=_listed(size_of),
        default=_listed(size_of)("4KiB,64KiB,1MiB,25MiB,100MiB"),
        metavar="SIZE,…",
        help="default: 4KiB,64KiB,1MiB,25MiB,100MiB",
    )
    collectives.add_argument(
        "--busy", action="store_true", help="the caller computes in pure Python meanwhile (all_reduce)"
    )
    collectives.add_argument("--profile", action="store_true", help="say where the time goes, stage by stage")
    _add_common(collectives, names.DEFAULT_CONTENDERS, rounds=15)
    collectives.set_defaults(run=run_collectives)
    train = _add(kinds, "train", "training steps of real models", TRAIN_EXAMPLES)
    train.add_argument("--models", type=_listed(_name_of(names.MODELS)), default=["gpt2"], metavar="MODEL,…")
    train.add_argument(
        "--bucket-mb", type=_listed(_positive(float)), default=[25.0], metavar="MB,…", help="of DDP; default: 25"
    )
    train.add_argument("--strategy", choices=names.STRATEGIES, default="ddp")
    _add_common(train, names.DEFAULT_TRAINING, rounds=7)
    train.set_defaults(run=run_train)
    bench_admission.add_to(kinds)


def _add(
    kinds: _SubParsersAction[argparse.ArgumentParser], name: str, summary: str, examples: str
) -> argparse.ArgumentParser:
    return kinds.add_parser(
        name,
        help=summary,
        description=DESCRIPTION,
        epilog=CONTENDERS + "\n" + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_common(parser: argparse.ArgumentParser, contenders: Sequence[str], rounds: int) -> None:
    count = _positive(int)
    parser.add_argument("--workers", type=_listed(count), default=[2, 4], metavar="N,…", help="default: 2,4")
    parser.add_argument("--rounds", type=count, default=rounds, metavar="N", help=f"default: {rounds}")
    parser.add_argument(
        "--contenders",
        type=_listed(_name_of(names.CONTENDERS)),
        default=list(contenders),
        metavar="NAME,…",
        help=f"default: {','.join(contenders)}",
    )
    parser.add_argument("--hosts", type=int, default=0, metavar="N", help="spread workers over N network namespaces")
    parser.add_argument("--rate", metavar="RATE", help="limit each host's link, such as 1gbit (with --hosts)")
    parser.add_argument(
        "--results", type=Path, default=Path("bench-results"), metavar="DIR", help="default: bench-results"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run_collectives(options: argparse.Namespace) -> int:
    """Measure collectives and print what they cost."""
    if options.busy and options.ops != ["all_reduce"]:
        raise ConfigurationError("--busy is for all_reduce: Gloo ends other operations only when they are waited for")
    contenders = [*options.contenders, *([names.PROFILED] if options.profile else [])]
    cases = [
        {"kind": "collective", "operation": operation, "size": size, "workers": workers, "busy": options.busy}
        for workers in options.workers
        for operation in options.ops
        for size in options.sizes
    ]
    return _measure(options, contenders, cases)


def run_train(options: argparse.Namespace) -> int:
    """Measure training steps and print what they cost."""
    if options.strategy == "fsdp2" and not set(options.contenders) <= set(names.GROUPS):
        raise ConfigurationError("FSDP2 needs process groups: leave the rings out of --contenders")
    cases = [
        {"kind": "training", "model": model, "strategy": options.strategy, "bucket_mb": bucket, "workers": workers}
        for workers in options.workers
        for model in options.models
        for bucket in (options.bucket_mb if options.strategy == "ddp" else [0.0])  # FSDP2 has no buckets
    ]
    return _measure(options, options.contenders, cases)


def _measure(options: argparse.Namespace, contenders: Sequence[str], cases: Sequence[Mapping[str, Any]]) -> int:
    from ringfence.bench import machine  # late, so that `doctor` starts where cryptography is missing
    from ringfence.bench.measure import Measurement, Setup
    from ringfence.bench.results import result

    if options.rate and not options.hosts:
        raise ConfigurationError("--rate limits the links between hosts: say how many with --hosts")
    if min(options.workers) < max(2, options.hosts):
        raise ConfigurationError("at least two workers, and one for each host, are needed")
    everyone = dict.fromkeys((*names.BASELINE, *contenders))  # without the baseline there is no ratio
    setup = Setup(
        contenders=tuple(everyone),
        rounds=options.rounds,
        results=options.results,
        command=" ".join(["ringfence", *sys.argv[1:]]),
        hosts=options.hosts,
        rate=options.rate,
    )
    signal.signal(signal.SIGTERM, _interrupt)  # workers and namespaces are ended by the same way out as on Ctrl-C
    facts = machine.facts()
    costs = _stage_costs() if names.PROFILED in everyone else {}
    results = [result(measured) for measured in Measurement(setup, cases, facts).run()]
    _print(options, results, facts, costs)
    return 0


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _stage_costs() -> dict[str, float]:
    from ringfence.bench.floor import stage_costs

    return stage_costs()


def _print(
    options: argparse.Namespace, results: Sequence[Result], facts: Mapping[str, Any], costs: dict[str, float]
) -> None:
    from ringfence.bench.table import table

    floors = _floors(results, costs) if costs else {}
    if options.json:
        lines = [{**each.as_json(), "floor_cpu_seconds": floors.get(index)} for index, each in enumerate(results)]
        document = {"machine": facts, "stage_ns_per_byte": costs, "results": lines}
        print(json.dumps(document, indent=2))
        return
    print(table(results, facts, floors))
    if costs:
        print("one core, ns per byte: " + ", ".join(f"{stage} {cost:.3f}" for stage, cost in costs.items()))
    print(f"samples: {options.results}")


def _floors(results: Sequence[Result], costs: dict[str, float]) -> dict[int, float]:
    from ringfence.bench.floor import floor

    return {
        index: floor(each.case["operation"], each.case["size"], each.case["workers"], costs)
        for index, each in enumerate(results)
    }


# -- arguments ------------------------------------------------------------------------------------------------------


def size_of(text: str) -> int:
    """ "25MiB" in bytes."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(B|KiB|MiB|GiB)?", text)
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 4 or size % 4:
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number of float32, such as 4KiB or 25MiB")
    return size


def _listed(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse_all(text: str) -> list[Any]:
        return [parse(each.strip()) for each in text.split(",")]

    return parse_all


def _name_of(known: Mapping[str, object] | Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(known)}")
        return text

    return parse


def _positive(number: type[int] | type[float]) -> Callable[[str], Any]:
    def parse(text: str) -> int | float:
        try:
            value = number(text)
        except ValueError:
            value = 0
        if not 0 < value < 1e9:
            raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
        return value

    return parse
