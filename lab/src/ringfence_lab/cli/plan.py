"""`ringfence plan`: what a training step costs, sealed and in the clear, on hardware and at scales one does not have."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence.cli.further_commands import LAB
from ringfence.cli.terminal import Commands, number, wrap
from ringfence.errors import ConfigurationError
from ringfence_lab.cli import plan_checks, plan_counts, plan_int8, plan_regions, plan_views
from ringfence_lab.cli.options import add_json, show
from ringfence_lab.plan import hardware, models
from ringfence_lab.plan.steps import STRATEGIES

if TYPE_CHECKING:
    from ringfence_lab.plan.hardware import Hardware
    from ringfence_lab.plan.models import Model
    from ringfence_lab.plan.steps import Question

DESCRIPTION = """\
Predict how long a training step takes on hardware, and at scales, that you do not have: with ringfence, in plaintext, and
sealed hop by hop.

The model of a step adds its computing and the collectives of DDP or FSDP, by the schedules that the runtime runs, and takes
off what overlaps. The output names the dominant term and recommends settings with the gain that each is expected to bring.
Torch is not needed.

The model is one of `plan models`, a number of parameters, or a list of tensor sizes: a JSON list or object of sizes or
shapes, or a text with one such as 4096x11008 at the end of each line.
"""

EXAMPLES = """\
examples:
  ringfence plan --model gpt2-xl --hardware tdx-100g --workers 64
  ringfence plan --parameters 7e9 --strategy fsdp
  ringfence plan --model llama-7b --sweep
  ringfence plan --model gpt2 --workers 8 --workers-per-machine 4
  ringfence plan models        the models with a name
  ringfence plan hardware      the profiles, and what in them is assumed
  ringfence plan published     predictions beside published figures
  ringfence plan int8          below which bandwidth int8 on the wire pays
  ringfence plan counts        what a worker does in a collective, by the number of workers
  ringfence plan regions       between sites: gradients in float32, in int8, or DiLoCo

To predict for your own machine, measure it with `ringfence study`, then:
  ringfence plan calibrate --study study-results --to here.toml
  ringfence plan --model gpt2 --hardware here --workers 8 --compute 1.5
  ringfence plan validate --study study-results

A prediction is worth what its inputs are worth: `ringfence plan hardware NAME` prints every figure with its source.
"""


def add_to(commands: Commands) -> None:
    """Add `plan` and what belongs to it to the command line."""
    parser = commands.add_parser(
        "plan",
        usage="ringfence plan [--model NAME] [--workers N] [--hardware NAME] [...]\n       ringfence plan WHAT ...",
        help=LAB["plan"],
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    _add_question(parser)
    _add_hardware(parser)
    parser.add_argument("--sweep", action="store_true", help="predict for 2 to 16,384 workers")
    add_json(parser)
    parser.set_defaults(run=run_plan)
    others = parser.add_subparsers(title="more", metavar="WHAT", prog="ringfence plan")
    for name, (run, about) in {
        "models": (run_models, "list the models with a name"),
        "hardware": (run_hardware, "list the hardware profiles, or print one"),
        "calibrate": (run_calibrate, "make a profile of this machine from a study"),
        "validate": (run_validate, "compare predictions with a study"),
        "published": (run_published, "predictions beside published figures"),
        "int8": (run_int8, "below which bandwidth int8 on the wire pays"),
        "counts": (plan_counts.run, "what a collective costs one worker of 2 to 16,384: rounds, seals, bytes, copies"),
        "regions": (plan_regions.run, "which way to train between sites pays, by the rate and the delay of the links"),
    }.items():
        other = others.add_parser(name, help=about)
        if name == "counts":
            plan_counts.add_to(other)
        elif name == "int8":
            plan_int8.add_to(other)
        elif name == "regions":
            plan_regions.add_to(other)
        elif name == "hardware":
            other.add_argument("name", nargs="?", help="a profile's name or file")
        elif name in ("calibrate", "validate"):
            _add_study(other, name)
        add_json(other)
        other.set_defaults(run=run)


def _add_question(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model").add_mutually_exclusive_group()
    group.add_argument("--model", metavar="NAME", help=f"a model of `plan models` (default: {_DEFAULT_MODEL})")
    group.add_argument("--parameters", type=float, metavar="N", help="only its number of parameters, such as 7e9")
    group.add_argument("--tensors", type=Path, metavar="FILE", help="a list of tensor sizes or shapes, as text or JSON")
    parser.add_argument(
        "--tokens", type=_COUNT, metavar="N", help="of a sample, unless --model is given (default: 2048)"
    )
    parser.add_argument(
        "--workers", type=number(1, _MOST_WORKERS), metavar="N", default=64, help="up to 16,384 (default: 64)"
    )
    parser.add_argument(
        "--workers-per-machine",
        type=_COUNT,
        metavar="N",
        help="that share its cores, its network card and memory (default: as the profile says)",
    )
    parser.add_argument("--samples", type=_COUNT, default=8, metavar="N", help="for each worker and step (default: 8)")
    parser.add_argument(
        "--compute", type=float, metavar="SECONDS", help="of a step without communication, if you know it"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of gradients (default: float32)",
    )
    parser.add_argument("--wire", choices=("float32", "bfloat16"), help="if they are sent as another type")
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default="ddp",
        help="all-reduces of DDP's buckets, or all-gathers and reduce-scatters of FSDP's units (default: ddp)",
    )
    parser.add_argument("--bucket-cap-mb", type=float, metavar="MIB", help="DDP's setting (default: DDP's own)")
    parser.add_argument("--unit-blocks", type=_COUNT, metavar="N", help="blocks in a unit of FSDP (default: 1)")
    parser.add_argument(
        "--keep-parameters", action="store_true", help="FSDP with reshard_after_forward=False: gathers once in a step"
    )
    parser.add_argument(
        "--channels",
        type=int,
        choices=(1, 2),
        help="connections and threads of a link; more were not measured (default: the runtime's choice)",
    )
    parser.add_argument("--every", type=_COUNT, default=1, metavar="H", help="synchronise once in H steps (DDP)")


_DEFAULT_MODEL = "gpt2-xl"
_COUNT = number(1, 1 << 20)
_MOST_WORKERS = 1 << 14  # a ring has twice as many steps, and each rank's schedule is built


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hardware", default="tdx-100g", metavar="NAME", help="a profile or a file (default: tdx-100g)"
    )


def _add_study(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(
        "--study", type=Path, default=Path("study-results"), metavar="DIR", help="the folder of the study"
    )
    if name == "validate":
        parser.add_argument(
            "--seed", type=int, default=0, metavar="N", help="divides the cells into halves (default: 0)"
        )
        return
    parser.add_argument(
        "--preset", metavar="NAME", help="of the study's gpu-tee cells: simulated GPU TEEs instead of this machine"
    )
    parser.add_argument(
        "--to", type=Path, default=Path("here.toml"), metavar="FILE", help="a new file (default: here.toml)"
    )


def run_plan(options: argparse.Namespace) -> int:
    """Predict one point, or a sweep over scales."""
    from ringfence_lab.plan.recommend import WORKERS, plan, sweep
    from ringfence_lab.progress import Progress

    profile = _with_machines(find_hardware(options.hardware), options.workers_per_machine)
    if options.compute is not None and not 0 < options.compute < math.inf:
        raise ConfigurationError("--compute is a finite number of seconds above zero")
    question = _question(options)
    plans = []
    with Progress(len(WORKERS)) as progress:
        for each in sweep(profile, question) if options.sweep else [plan(profile, question)]:
            plans.append(each)
            progress.step("predicting")
    text = plan_views.sweep_text(profile, plans) if options.sweep else plan_views.plan_text(profile, plans[0])
    return show(options, plan_views.plans_json(profile, plans), text)


def _with_machines(profile: Hardware, per_machine: int | None) -> Hardware:
    """Return the profile with another number of workers in a machine; they share memory."""
    if per_machine is None:
        return profile
    if profile.variants and profile["inside", "sealed"]:
        raise ConfigurationError(
            "--workers-per-machine: the study of this profile has no machines with several workers; measure "
            "`ringfence study --grid machines`, then `ringfence plan calibrate`"
        )
    return profile.with_values(node_workers=per_machine, inside_sealed=0)


def run_models(options: argparse.Namespace) -> int:
    """List the models."""
    found = [models.load(name) for name in models.names()]
    return show(options, plan_views.models_json(found), plan_views.models_text(found))


def run_hardware(options: argparse.Namespace) -> int:
    """List the profiles, or show one."""
    if options.name is None:
        profiles = [hardware.load(name) for name in hardware.names()]
        shown: Any = {each.name: {"title": each.title, "assumed": len(each.assumed())} for each in profiles}
        return show(options, shown, plan_views.profiles_text(profiles))
    profile = find_hardware(options.name)
    return show(options, plan_views.profile_json(profile), plan_views.profile_text(profile))


def run_int8(options: argparse.Namespace) -> int:
    """Predict sums with int8 on the wire."""
    profile = _with_machines(find_hardware(options.hardware), options.workers_per_machine)
    found = plan_int8.predict(profile, options.workers, options.size, options.measure)
    return show(options, found, plan_int8.as_text(found))


def run_calibrate(options: argparse.Namespace) -> int:
    """Fit a profile to a study and write it to a file."""
    from ringfence.config.private_files import write_new
    from ringfence_lab.plan import gpu_tee
    from ringfence_lab.plan.calibrate import calibrate

    _check_new(options.to)
    rows, cores, date = read_study(options.study)
    preset = _preset(rows, options.preset)
    profile = gpu_tee.calibrate(rows, preset) if preset else calibrate(rows, cores)
    text = hardware.dump(profile, f"ringfence plan calibrate, {len(rows)} rows of a study", date)
    write_new(options.to, text.encode(), 0o644, "a profile")
    written = wrap(f"Wrote {options.to}. Use it with --hardware {options.to}")
    return show(options, plan_views.profile_json(profile), f"{plan_views.profile_text(profile)}\n{written}")


def run_validate(options: argparse.Namespace) -> int:
    """Predict each half of a study from the other."""
    from ringfence_lab.plan.validate import validate

    rows, cores, _ = read_study(options.study)
    found = validate(rows, options.seed, cores)
    return show(options, found.as_json(), plan_checks.validation_text(found))


def _preset(rows: list[dict[str, Any]], asked: str | None) -> str | None:
    """Return the simulated GPU TEE to calibrate, or None for this machine: if it is asked for, or nothing else was measured."""
    from ringfence_lab.plan import gpu_tee

    known = gpu_tee.presets(rows)
    if asked is not None and asked not in known:
        there = f"its gpu-tee cells are of {', '.join(known)}" if known else "it has no gpu-tee cells"
        raise ConfigurationError(f"--preset {asked}: not in this study; {there}")
    if asked is not None or not known or any(row["kind"] != gpu_tee.KIND for row in rows):
        return asked
    if len(known) > 1:
        raise ConfigurationError(f"the study has gpu-tee cells of {', '.join(known)}: choose one with --preset")
    return known[0]


def run_published(options: argparse.Namespace) -> int:
    """The model beside what others measured."""
    from ringfence_lab.plan import published

    found = [{**asdict(each), "decisive": each.decisive} for each in published.slowdowns()]
    return show(options, found, plan_checks.published_text())


def find_hardware(name: str) -> Hardware:
    """A profile of the package, a file, or a file of that name with .toml in this folder."""
    if name in hardware.names():
        return hardware.load(name)
    for path in (Path(name), Path(f"{name}.toml")):
        if path.is_file():
            return hardware.parse(_text(path, "the hardware profile "), path.stem)
    hint = "; `ringfence plan calibrate` makes here.toml from a study" if name == "here" else ""
    raise ConfigurationError(f"no hardware profile or file is called {name!r}: {', '.join(hardware.names())}{hint}")


def model_of(options: argparse.Namespace) -> Model:
    """Return the model that the options choose. Raises ConfigurationError if a file cannot be read or understood."""
    tokens = options.tokens or models.TOKENS
    if options.parameters is not None:
        return models.of_count(options.parameters, tokens)
    if options.tensors is not None:
        return models.of_listing(_text(options.tensors), options.tensors.name, tokens)
    if options.tokens is not None:
        raise ConfigurationError("--tokens is for --parameters and --tensors: a named model has its own")
    return models.load(options.model or _DEFAULT_MODEL)


def _text(path: Path, what: str = "") -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {what}{path}: {error}") from None


def read_study(folder: Path) -> tuple[list[dict[str, Any]], int, str]:
    """The summary rows of what was measured last, as in the report of the study; the machine's cores; the day."""
    from ringfence_lab.report.study import read

    study = read(folder)
    if not study.command:
        raise ConfigurationError(
            f"{folder}: nothing says who measured its rows and when; `ringfence study rebuild` makes the summary anew"
        )
    cores = int(study.facts.get("cores") or os.cpu_count() or 1)
    return [dict(row) for row in study.rows], cores, study.dates[-1][:10]


def _check_new(path: Path) -> None:
    """What exists is kept; a place that cannot be written to is told before the work, not after it."""
    if os.path.lexists(path):
        raise ConfigurationError(f"{path} exists, and is not overwritten: name a new file with --to")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigurationError(f"cannot write {path}: name a file in a folder that is there and yours with --to")


def _question(options: argparse.Namespace) -> Question:
    from ringfence_lab.plan.steps import Question

    width = {"float32": 4, "bfloat16": 2}
    if options.bucket_cap_mb is not None and not 0 < options.bucket_cap_mb < math.inf:
        raise ConfigurationError("--bucket-cap-mb is a finite number of MiB above zero")
    for wanted, given in _GIVEN[options.strategy].items():
        if getattr(options, wanted) != given:
            raise ConfigurationError(f"--{wanted.replace('_', '-')} does not apply to --strategy {options.strategy}")
    return Question(
        model=model_of(options),
        workers=options.workers,
        cap_mib=options.bucket_cap_mb,
        bytes_each=width[options.dtype],
        samples=options.samples,
        channels=options.channels,
        every=options.every,
        wire_bytes=width[options.wire or options.dtype],
        compute_seconds=options.compute,
        strategy=options.strategy,
        blocks=options.unit_blocks or 1,
        reshard=not options.keep_parameters,
    )


# Options of one strategy that have to keep their default with the other.
_GIVEN: dict[str, dict[str, Any]] = {
    "ddp": {"unit_blocks": None, "keep_parameters": False},
    "fsdp": {"bucket_cap_mb": None, "every": 1},
}
