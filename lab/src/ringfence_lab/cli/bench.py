"""`ringfence bench`: what sealing costs on this machine, against plaintext Gloo in the same processes."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence.cli import requirements
from ringfence.cli.further_commands import LAB
from ringfence.cli.terminal import Commands, number
from ringfence.errors import ConfigurationError
from ringfence_lab.bench import bounds, names, netns, tunnels
from ringfence_lab.bench.units import bytes_of
from ringfence_lab.cli import bench_admission, bench_link
from ringfence_lab.cli.options import add_json, listed, positive, show
from ringfence_lab.study.blocks import name_of

if TYPE_CHECKING:
    from ringfence_lab.bench.measure import Setup

_MOST_WORKERS = 1 << 10

DESCRIPTION = """\
Time collectives, or training steps, on plaintext Gloo, on ringfence and on other implementations of sealing. The variants
take turns in the same worker processes. Gloo runs twice: the difference between its two runs is the
resolution of the measurement.

Raw samples are appended to a folder. The same command continues where it was stopped, and only prints if nothing is missing.
"""


def _variants_text(known: Mapping[str, str]) -> str:
    return "\n".join(f"  {name:20} {what}" for name, what in known.items())


VARIANTS = f"variants:\n{_variants_text(names.VARIANTS | names.TUNNELS | names.QUANTISED)}\n"

COLLECTIVES_EXAMPLES = f"""\

variants with --device:
{_variants_text(names.DEVICE_VARIANTS)}

examples:
  ringfence bench collectives
  ringfence bench collectives --sizes 25MiB --workers 2 --profile
  ringfence bench collectives --ops all_gather,broadcast --sizes 25MiB --json
  ringfence bench collectives --sizes 25MiB --hosts 2 --rate 1gbit      between network namespaces; needs root
  ringfence bench collectives --sizes 25MiB --hosts 2 --rate 1gbit --delay 50ms --variants ringfence,int8
  ringfence bench collectives --device sim --copy-rate 2,10 --workers 2 --sizes 100MiB --profile
"""

TRAIN_EXAMPLES = """\

examples:
  ringfence bench train --models gpt2 --workers 2
  ringfence bench train --models gpt2 --workers 2 --bucket-cap-mb default,50,100
  ringfence bench train --models bert-base --workers 2 --strategy fsdp2
"""

LATENCY_DESCRIPTION = """\
Time single calls of all-reduce between two workers, each after a barrier, and the same calls back to back. Medians and
percentiles show what the means of `ringfence bench collectives` hide: a few calls of Gloo take very long.
"""

LATENCY_EXAMPLES = """\
examples:
  ringfence bench latency --json > call-latency.json
"""

BOUNDS_DESCRIPTION = """\
Measure the CPU time for a byte of sealing, opening, sending, receiving, adding and copying on this machine, alone and with all
cores busy. From these and the schedules follows how long a collective takes at least, whatever the code between them does.
"""

BOUNDS_EXAMPLES = """\
examples:
  ringfence bench bounds
  ringfence bench bounds --without-vaes                  as on an older CPU
"""

MEMORY_DESCRIPTION = """\
The most memory that an all-reduce takes beyond the tensor itself, for each worker and for each of its links.
"""

MEMORY_EXAMPLES = """\
examples:
  ringfence bench memory
  ringfence bench memory --sizes 400MiB --workers 4 --variants gloo-b,ringfence,hop-by-hop
"""


def add_to(commands: Commands) -> None:
    """Add `bench collectives`, `train`, `memory`, `latency` and `admission` to the command line."""
    bench = commands.add_parser("bench", help=LAB["bench"], description=DESCRIPTION)
    kinds = bench.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    _add_collectives(kinds)
    _add_train(kinds)
    memory = _add(kinds, "memory", run_memory, "memory beyond the tensors", MEMORY_EXAMPLES, MEMORY_DESCRIPTION)
    _add_list(memory, "--sizes", bytes_of, "25MiB,100MiB,400MiB", "SIZE")
    _add_list(memory, "--workers", number(1, _MOST_WORKERS), "2,4", "N")
    _add_list(memory, "--variants", name_of(names.VARIANTS), ",".join(names.DEFAULT_MEMORY), "NAME")
    _add_folder(memory, rounds=3)
    latency = _add(kinds, "latency", run_latency, "single calls", LATENCY_EXAMPLES, LATENCY_DESCRIPTION)
    _add_rounds(latency, rounds=15)
    least = _add(kinds, "bounds", run_bounds, "stages, and lower bounds", BOUNDS_EXAMPLES, BOUNDS_DESCRIPTION)
    least.add_argument("--without-vaes", action="store_true", help="hide these instructions from OpenSSL")
    add_json(least)
    bench_link.add_to(kinds)
    bench_admission.add_to(kinds)


def _add_collectives(kinds: Commands) -> None:
    collectives = _add(kinds, "collectives", run_collectives, "single collectives by size", COLLECTIVES_EXAMPLES)
    _add_list(collectives, "--ops", name_of(names.OPERATIONS), "all_reduce", "OP", None)
    _add_list(collectives, "--sizes", bytes_of, "4KiB,64KiB,1MiB,25MiB,100MiB", "SIZE")
    collectives.add_argument(
        "--busy", action="store_true", help="the caller computes in pure Python meanwhile (all_reduce)"
    )
    collectives.add_argument("--profile", action="store_true", help="say where the time goes, stage by stage")
    collectives.add_argument(
        "--device",
        choices=names.DEVICES,
        help="where the tensors are; sim is simulated and needs a C++ compiler. Default: the host",
    )
    collectives.add_argument(
        "--copy-rate",
        type=listed(positive),
        default=[0.0],
        metavar="GB/S,…",
        help="of the simulated device, in each direction; default: as fast as the machine",
    )
    collectives.add_argument(
        "--confidential", action="store_true", help="the simulated device copies as GPUs in confidential mode do"
    )
    bench_link.add_options(collectives)
    _add_common(collectives, names.DEFAULT_VARIANTS, str, rounds=15)
    collectives.set_defaults(variants=None)  # they depend on the device


def _add_train(kinds: Commands) -> None:
    train = _add(kinds, "train", run_train, "training steps of real models", TRAIN_EXAMPLES)
    _add_list(train, "--models", name_of(names.MODELS), "gpt2", "MODEL", None)
    cap = "of DDP; `default` (the default) leaves it to DDP: 25, after a first bucket of 1"
    _add_list(train, "--bucket-cap-mb", _bucket, "default", "MIB", cap)
    train.add_argument("--strategy", choices=names.STRATEGIES, default="ddp")
    _add_common(train, names.GROUPS, name_of(names.VARIANTS), rounds=7)


def _add(
    kinds: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    examples: str,
    description: str = DESCRIPTION,
) -> argparse.ArgumentParser:
    parser = kinds.add_parser(
        name,
        help=summary,
        description=description,
        epilog=VARIANTS + examples if description is DESCRIPTION else examples,
    )
    parser.set_defaults(run=run)
    return parser


def _add_list(
    parser: argparse.ArgumentParser,
    option: str,
    parse: Callable[[str], Any],
    default: str,
    what: str,
    text: str | None = "default: {}",
) -> None:
    """Add an option that takes a list of values, whose default is in its help unless `text` says otherwise."""
    help_text = text and text.format(default)
    parser.add_argument(option, type=listed(parse), default=default, metavar=f"{what},…", help=help_text)


def _add_common(
    parser: argparse.ArgumentParser, variants: Sequence[str], parse: Callable[[str], str], rounds: int
) -> None:
    _add_list(parser, "--workers", number(1, _MOST_WORKERS), "2,4", "N")
    _add_list(parser, "--variants", parse, ",".join(variants), "NAME")
    parser.add_argument(
        "--hosts",
        type=number(0, _MOST_WORKERS),
        default=0,
        metavar="N",
        help="spread workers over N machines, which are network namespaces (needs root). Workers of one machine share memory. "
        "Without it each worker stands for a machine of its own: all seal what they send",
    )
    parser.add_argument("--rate", metavar="RATE", help="limit each host's link, such as 1gbit (with --hosts)")
    _add_folder(parser, rounds)


def _add_folder(parser: argparse.ArgumentParser, rounds: int) -> None:
    _add_rounds(parser, rounds)
    parser.add_argument(
        "--results", type=Path, default=Path("bench-results"), metavar="DIR", help="default: bench-results"
    )


def _add_rounds(parser: argparse.ArgumentParser, rounds: int) -> None:
    parser.add_argument("--rounds", type=number(1, 1 << 20), default=rounds, metavar="N", help=f"default: {rounds}")
    add_json(parser)


# -- commands -------------------------------------------------------------------------------------------------------


def run_collectives(options: argparse.Namespace) -> int:
    """Run `ringfence bench collectives`."""
    if options.busy and options.ops != ["all_reduce"]:
        raise ConfigurationError("--busy is for all_reduce: Gloo ends other operations only when they are waited for")
    variants = [*_collective_variants(options), *([names.PROFILED] if options.profile else [])]
    cases: list[dict[str, Any]] = [
        {"kind": "collective", "operation": operation, "size": size, "workers": workers, "busy": options.busy}
        for workers in options.workers
        for operation in options.ops
        for size in options.sizes
    ]
    if options.device is not None:
        about = {"device": options.device, "confidential": options.confidential}
        cases = [{**case, **about, "copy_rate": rate * 1e9} for case in cases for rate in options.copy_rate]
    return _measure(options, variants, cases)


def _collective_variants(options: argparse.Namespace) -> list[str]:
    """Return the variants to compare, those of the baseline first.

    Raises ConfigurationError if one does not exist for these tensors, or an option is for others.
    """
    if options.device != names.SIMULATED and (options.confidential or any(options.copy_rate)):
        raise ConfigurationError("--copy-rate and --confidential are for the simulated device: add --device sim")
    if options.device is None:
        known = names.VARIANTS | names.TUNNELS | names.QUANTISED
        return _known(options.variants or names.DEFAULT_VARIANTS, known, "host tensors")
    if options.busy:
        raise ConfigurationError("--busy is for host tensors: leave out --device")
    chosen = _known(options.variants or names.DEFAULT_ON_DEVICE, names.DEVICE_VARIANTS, f"tensors on {options.device}")
    for name in names.CUDA_VARIANTS:
        if name in chosen and options.device != "cuda":
            raise ConfigurationError(f"{name} does not know tensors on {options.device}: leave it out of --variants")
    return list(dict.fromkeys((*names.HOST, *chosen)))


def _known(chosen: Sequence[str], known: Mapping[str, str], where: str) -> list[str]:
    for name in chosen:
        if name not in known:
            raise ConfigurationError(f"--variants: {name!r} is none of {', '.join(known)}, which there are for {where}")
    return list(chosen)


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


def _measure(options: argparse.Namespace, variants: Sequence[str], cases: Sequence[Mapping[str, Any]]) -> int:
    if options.rate and not options.hosts:
        raise ConfigurationError("--rate limits the links between hosts: give their number with --hosts")
    if min(options.workers) < max(2, options.hosts):
        raise ConfigurationError("at least two workers, and one for each host, are needed")
    tunnels.check(options.hosts, variants)
    if options.rate:
        netns.bits_per_second(options.rate)
    bench_link.check(options)
    _prepare_workers()
    from ringfence_lab.bench import machine  # these need torch
    from ringfence_lab.bench.measure import measure
    from ringfence_lab.bench.result_table import results_text
    from ringfence_lab.bench.results import result

    all_variants = dict.fromkeys((*names.baseline(cases[0]), *variants))  # without the baseline there is no ratio
    facts = machine.facts()
    results = [result(measured) for measured in measure(_setup(options, tuple(all_variants)), cases, facts)]
    document = {"machine": facts, "results": [each.as_json() for each in results]}
    return _print(options, document, results_text(results))


def run_memory(options: argparse.Namespace) -> int:
    """Run `ringfence bench memory`."""
    from ringfence_lab.bench import machine, memory_use

    if min(options.workers) < 2:
        raise ConfigurationError("at least two workers are needed")
    _prepare_workers()
    facts = machine.facts()
    measured = memory_use.measure(_setup(options, options.variants), options.sizes, options.workers, facts)
    results = [memory_use.result(each) for each in measured]
    document = {"machine": facts, "results": [asdict(each) for each in results]}
    return _print(options, document, memory_use.results_text(results))


def run_latency(options: argparse.Namespace) -> int:
    """Run `ringfence bench latency`."""
    from ringfence_lab.bench import latency, machine

    _prepare_workers()
    results, facts = latency.measure(options.rounds), machine.facts()
    about = {"command": "ringfence bench latency", "date": machine.now(), "machine": facts, "rounds": options.rounds}
    return _print(options, {**about, "sizes": results}, latency.results_text(results))


def run_bounds(options: argparse.Namespace) -> int:
    """Run `ringfence bench bounds`."""
    from ringfence_lab.bench import machine

    requirements.torch_here("bench bounds")
    found = bounds.document(vaes=not options.without_vaes)
    return _print(options, {"machine": machine.facts(), **found}, bounds.results_text(found))


def _prepare_workers() -> None:
    requirements.workers()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends workers and namespaces as Ctrl-C does


def _setup(options: argparse.Namespace, variants: Sequence[str]) -> Setup:
    from ringfence_lab.bench.measure import Setup

    optional = {name: getattr(options, name) for name in ("hosts", "rate", "device", "link") if hasattr(options, name)}
    return Setup(tuple(variants), options.rounds, options.results, _command(sys.argv[1:]), **optional)


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


def _print(options: argparse.Namespace, document: Mapping[str, Any], text: str) -> int:
    """Print the results as JSON, or as text with the machine and the folder of their samples."""
    from ringfence_lab.bench.result_table import machine_text

    samples = f"\nsamples: {options.results}" if hasattr(options, "results") else ""
    return show(options, document, f"{machine_text(document['machine'])}\n\n{text}{samples}")


def _bucket(text: str) -> float | None:
    """A size in MiB; None is DDP's own."""
    return None if text == "default" else positive(text)
