"""`ringfence bench`: what sealing costs on this machine, against plaintext Gloo in the same processes."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence.cli import requirements
from ringfence.cli.further_commands import LAB
from ringfence.errors import ConfigurationError
from ringfence_lab.bench import names
from ringfence_lab.bench.units import bytes_of
from ringfence_lab.cli import bench_admission, bench_device

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ringfence_lab.bench.link import LinkResult
    from ringfence_lab.bench.measure import Setup
    from ringfence_lab.bench.memory_use import MemoryResult
    from ringfence_lab.bench.results import Result

DESCRIPTION = """\
Time collectives, or training steps, on plaintext Gloo, on ringfence and on other implementations of sealing. The variants
take turns in the same worker processes. Gloo runs twice: the difference between its two runs is the
resolution of the measurement.

Raw samples are appended to a folder. The same command continues where it was stopped, and only prints if nothing is missing.
"""

VARIANTS = "variants:\n" + "\n".join(f"  {name:20} {what}" for name, what in names.VARIANTS.items())

COLLECTIVES_EXAMPLES = """\

examples:
  ringfence bench collectives
  ringfence bench collectives --sizes 25MiB --workers 2 --profile
  ringfence bench collectives --ops all_gather,broadcast --sizes 25MiB --json
  ringfence bench collectives --sizes 25MiB --hosts 2 --rate 1gbit      between network namespaces; needs root
  ringfence bench collectives --device sim --copy-rate 2,10 --workers 2 --sizes 100MiB --profile
"""

TRAIN_EXAMPLES = """\

examples:
  ringfence bench train --models gpt2 --workers 2
  ringfence bench train --models gpt2 --workers 2 --bucket-cap-mb default,50,100
  ringfence bench train --models bert-base --workers 2 --strategy fsdp2
"""

LINK_DESCRIPTION = """\
Seal and open the segments of one link on several threads, in memory. The result is what a worker with spare cores could gain:
ringfence itself seals on one thread for each channel of a link.
"""

LINK_EXAMPLES = """\
examples:
  ringfence bench link
  ringfence bench link --segments 256KiB,512KiB --threads 1,2,4
"""

MEMORY_DESCRIPTION = """\
The most memory that an all-reduce takes beyond the tensor itself, for each worker and for each of its links.
"""

MEMORY_EXAMPLES = """\
examples:
  ringfence bench memory
  ringfence bench memory --sizes 400MiB --workers 4 --variants gloo-b,ringfence,hop-by-hop
"""


def add_to(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench collectives`, `train`, `link`, `memory` and `admission` to the command line."""
    bench = commands.add_parser("bench", help=LAB["bench"], description=DESCRIPTION)
    kinds = bench.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    collectives = _add(
        kinds, "collectives", "single collectives by size", "\n" + bench_device.VARIANTS + "\n" + COLLECTIVES_EXAMPLES
    )
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
    bench_device.add_to(collectives)
    _add_common(collectives, names.DEFAULT_VARIANTS, rounds=15, known={**names.VARIANTS, **names.DEVICE_VARIANTS})
    collectives.set_defaults(variants=None)  # they depend on the device
    collectives.set_defaults(run=run_collectives)
    train = _add(kinds, "train", "training steps of real models", TRAIN_EXAMPLES)
    train.add_argument("--models", type=_listed(_name_of(names.MODELS)), default=["gpt2"], metavar="MODEL,…")
    train.add_argument(
        "--bucket-cap-mb",
        type=_listed(_bucket),
        default=[None],
        metavar="MIB,…",
        help="of DDP; `default` (the default) leaves it to DDP: 25, after a first bucket of 1",
    )
    train.add_argument("--strategy", choices=names.STRATEGIES, default="ddp")
    _add_common(train, names.DEFAULT_TRAINING, rounds=7)
    train.set_defaults(run=run_train)
    _add_link(kinds)
    _add_memory(kinds)
    bench_admission.add_to(kinds)


def _add_link(kinds: _SubParsersAction[argparse.ArgumentParser]) -> None:
    link = _add(kinds, "link", "sealing and opening on several threads", LINK_EXAMPLES, LINK_DESCRIPTION)
    sizes = "16KiB,64KiB,256KiB,512KiB"
    link.add_argument(
        "--segments", type=_listed(size_of), default=_listed(size_of)(sizes), metavar="SIZE,…", help=f"default: {sizes}"
    )
    threads = list(range(1, len(os.sched_getaffinity(0)) + 1))
    link.add_argument(
        "--threads",
        type=_listed(_positive(int)),
        default=threads,
        metavar="N,…",
        help="default: 1 to the number of cores",
    )
    _add_folder(link, rounds=9)
    link.set_defaults(run=run_link)


def _add_memory(kinds: _SubParsersAction[argparse.ArgumentParser]) -> None:
    memory = _add(kinds, "memory", "memory beyond the tensors", MEMORY_EXAMPLES, MEMORY_DESCRIPTION)
    sizes = "25MiB,100MiB,400MiB"
    memory.add_argument(
        "--sizes", type=_listed(size_of), default=_listed(size_of)(sizes), metavar="SIZE,…", help=f"default: {sizes}"
    )
    _add_workers(memory, names.DEFAULT_MEMORY)
    _add_folder(memory, rounds=3)
    memory.set_defaults(run=run_memory)


def _add(
    kinds: _SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    examples: str,
    description: str = DESCRIPTION,
) -> argparse.ArgumentParser:
    return kinds.add_parser(
        name,
        help=summary,
        description=description,
        epilog=VARIANTS + "\n" + examples if description is DESCRIPTION else examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_common(
    parser: argparse.ArgumentParser, variants: Sequence[str], rounds: int, known: Mapping[str, str] = names.VARIANTS
) -> None:
    _add_workers(parser, variants, known)
    parser.add_argument(
        "--hosts",
        type=_count,
        default=0,
        metavar="N",
        help="spread workers over N machines, which are network namespaces (needs root). Workers of one machine share memory. "
        "Without it each worker stands for a machine of its own: all seal what they send",
    )
    parser.add_argument("--rate", metavar="RATE", help="limit each host's link, such as 1gbit (with --hosts)")
    _add_folder(parser, rounds)


def _add_workers(
    parser: argparse.ArgumentParser, variants: Sequence[str], known: Mapping[str, str] = names.VARIANTS
) -> None:
    parser.add_argument("--workers", type=_listed(_positive(int)), default=[2, 4], metavar="N,…", help="default: 2,4")
    parser.add_argument(
        "--variants",
        type=_listed(_name_of(known)),
        default=list(variants),
        metavar="NAME,…",
        help=f"default: {','.join(variants)}",
    )


def _add_folder(parser: argparse.ArgumentParser, rounds: int) -> None:
    parser.add_argument("--rounds", type=_positive(int), default=rounds, metavar="N", help=f"default: {rounds}")
    parser.add_argument(
        "--results", type=Path, default=Path("bench-results"), metavar="DIR", help="default: bench-results"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run_collectives(options: argparse.Namespace) -> int:
    """Run `ringfence bench collectives`."""
    if options.busy and options.ops != ["all_reduce"]:
        raise ConfigurationError("--busy is for all_reduce: Gloo ends other operations only when they are waited for")
    chosen = bench_device.variants_of(options, names.DEFAULT_VARIANTS)
    variants = [*chosen, *([names.PROFILED] if options.profile else [])]
    cases = [
        {"kind": "collective", "operation": operation, "size": size, "workers": workers, "busy": options.busy}
        for workers in options.workers
        for operation in options.ops
        for size in options.sizes
    ]
    return _measure(options, variants, bench_device.cases_of(options, cases))


def run_train(options: argparse.Namespace) -> int:
    """Run `ringfence bench train`."""
    if options.strategy == "fsdp2" and not set(options.variants) <= set(names.GROUPS):
        raise ConfigurationError("FSDP2 needs process groups: leave the rings out of --variants")
    cases = [
        {"kind": "training", "model": model, "strategy": options.strategy, "bucket_mb": bucket, "workers": workers}
        for workers in options.workers
        for model in options.models
        for bucket in (options.bucket_cap_mb if options.strategy == "ddp" else [0.0])  # FSDP2 has no buckets
    ]
    return _measure(options, options.variants, cases)


def run_link(options: argparse.Namespace) -> int:
    """Run `ringfence bench link`."""
    from ringfence_lab.bench import link, machine

    facts = machine.facts()
    measured = link.measure(_setup(options, ()), options.segments, options.threads, facts)
    results = [link.result(each) for each in measured]
    _print_plainly(options, facts, results, link.results_text(results))
    return 0


def run_memory(options: argparse.Namespace) -> int:
    """Run `ringfence bench memory`."""
    from ringfence_lab.bench import machine
    from ringfence_lab.bench import memory_use as memory

    if min(options.workers) < 2:
        raise ConfigurationError("at least two workers are needed")
    requirements.workers()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    facts = machine.facts()
    measured = memory.measure(_setup(options, options.variants), options.sizes, options.workers, facts)
    results = [memory.result(each) for each in measured]
    _print_plainly(options, facts, results, memory.results_text(results))
    return 0


def _setup(options: argparse.Namespace, variants: Sequence[str]) -> Setup:
    from ringfence_lab.bench.measure import Setup

    return Setup(
        variants=tuple(variants),
        rounds=options.rounds,
        results=options.results,
        command=_command(sys.argv[1:]),
        hosts=getattr(options, "hosts", 0),
        rate=getattr(options, "rate", None),
        device=getattr(options, "device", None),
    )


def _command(arguments: Sequence[str]) -> str:
    """Return the command line without --results: samples are published, and must not contain paths of this machine."""
    kept = []
    words = iter(arguments)
    for word in words:
        if word == "--results":
            next(words, None)
        elif not word.startswith("--results="):
            kept.append(word)
    return " ".join(["ringfence", *kept])


def _measure(options: argparse.Namespace, variants: Sequence[str], cases: Sequence[Mapping[str, Any]]) -> int:
    from ringfence_lab.bench import machine  # late, so that `doctor` starts where cryptography is missing
    from ringfence_lab.bench.measure import Measurement
    from ringfence_lab.bench.results import result

    if options.rate and not options.hosts:
        raise ConfigurationError("--rate limits the links between hosts: give their number with --hosts")
    if min(options.workers) < max(2, options.hosts):
        raise ConfigurationError("at least two workers, and one for each host, are needed")
    requirements.workers()
    all_variants = dict.fromkeys((*names.baseline(cases[0]), *variants))  # without the baseline there is no ratio
    setup = _setup(options, tuple(all_variants))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends workers and namespaces as Ctrl-C does
    facts = machine.facts()
    on_host = setup.device is None  # the lower bound knows no copies between host and device
    costs = _stage_costs(setup, facts) if names.PROFILED in all_variants and on_host else {}
    results = [result(measured) for measured in Measurement(setup, cases, facts).run()]
    lower_bounds = _lower_bounds(setup, facts, results, costs) if costs else {}
    _print(options, results, facts, costs, lower_bounds)
    return 0


def _stage_costs(setup: Setup, facts: Mapping[str, Any]) -> dict[str, float]:
    from ringfence_lab.bench.lower_bound import recorded_costs

    return recorded_costs(setup, facts)


def _print(
    options: argparse.Namespace,
    results: Sequence[Result],
    facts: Mapping[str, Any],
    costs: dict[str, float],
    lower_bounds: dict[int, float],
) -> None:
    from ringfence_lab.bench.result_table import results_text
    from ringfence_lab.tables import paragraph

    if options.json:
        lines = [
            {**each.as_json(), "lower_bound_cpu_seconds": lower_bounds.get(index)} for index, each in enumerate(results)
        ]
        document = {"machine": facts, "stage_ns_per_byte": costs, "results": lines}
        print(json.dumps(document, indent=2))
        return
    print(results_text(results, facts, lower_bounds))
    if costs:
        print(paragraph("one core, ns per byte: " + ", ".join(f"{stage} {cost:.3f}" for stage, cost in costs.items())))
    print(f"samples: {options.results}")


def _print_plainly(
    options: argparse.Namespace, facts: Mapping[str, Any], results: Sequence[LinkResult | MemoryResult], text: str
) -> None:
    from ringfence_lab.bench.result_table import machine_text

    if options.json:
        print(json.dumps({"machine": facts, "results": [each.as_json() for each in results]}, indent=2))
        return
    print("\n".join([machine_text(facts), "", text, f"samples: {options.results}"]))


def _lower_bounds(
    setup: Setup, facts: Mapping[str, Any], results: Sequence[Result], costs: dict[str, float]
) -> dict[int, float]:
    from ringfence_lab.bench.lower_bound import recorded_lower_bound

    return {index: recorded_lower_bound(setup, facts, each.case, costs) for index, each in enumerate(results)}


# -- arguments ------------------------------------------------------------------------------------------------------


def size_of(text: str) -> int:
    """ "25MiB" in bytes."""
    try:
        return bytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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


def _bucket(text: str) -> float | None:
    """A size in MiB; None is DDP's own."""
    size: float | None = None if text == "default" else _positive(float)(text)
    return size


def _count(text: str) -> int:
    """A whole number; 0 is none."""
    value: int = 0 if text == "0" else _positive(int)(text)
    return value


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
