"""`ringfence plan --trace`: the sealed step of a recorded job. `ringfence plan traces` checks such predictions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence.cli.terminal import table, wrap
from ringfence.errors import ConfigurationError
from ringfence_lab.cli.plan_views import assumed_text, seconds_text, share_text, step_json, terms_text, variants_text

if TYPE_CHECKING:
    from ringfence_lab.bench.trace_check import Checked
    from ringfence_lab.plan.hardware import Hardware
    from ringfence_lab.plan.job_cost import BucketSize, JobPlan
    from ringfence_lab.plan.jobs import Job
    from ringfence_lab.plan.recorded import Recording

# Options that describe a model or a step, which a trace does, with the defaults that they keep.
_NOT_WITH_TRACE: dict[str, Any] = {
    "samples": 8,
    "dtype": "float32",
    "wire": None,
    "strategy": "ddp",
    "bucket_cap_mb": None,
    "schedule": "table",
    "unit_blocks": None,
    "keep_parameters": False,
    "channels": 1,
    "every": 1,
    "tokens": None,
    "sweep": False,
}


def run(options: argparse.Namespace, profile: Hardware) -> int:
    """Predict the sealed step of the job in the files of --trace."""
    from ringfence_lab.plan.job_cost import plan_job
    from ringfence_lab.plan.jobs import job_of

    for name, default in _NOT_WITH_TRACE.items():
        if getattr(options, name) != default:
            raise ConfigurationError(f"--{name.replace('_', '-')} does not apply to --trace: the trace says it")
    recordings = [_recording(path) for path in options.trace]
    if options.workers is not None:
        for recording in recordings:
            recording.workers = recording.workers or options.workers
    found = plan_job(profile, job_of(recordings), options.compute, options.workers, options.step)
    print(json.dumps(plan_json(profile, found), indent=2) if options.json else plan_text(profile, found))
    return 0


def _recording(path: Path) -> Recording:
    from ringfence_lab.plan.trace_files import read

    try:
        with path.open("rb") as file:
            return read(file, path.name)
    except OSError as error:
        raise ConfigurationError(f"cannot read the trace {path}: {error.strerror}") from None


def plan_text(profile: Hardware, plan: JobPlan) -> str:
    """Lay out what was recorded, what is predicted, and which bucket size is best."""
    job, sealed = plan.job, plan.variants["ringfence"]
    scale = "" if job.workers == plan.recorded_workers else f"{job.workers:,} workers "
    lines = [wrap(_recorded(plan)), wrap(f"{scale}on {profile.title}"), ""]
    lines += [
        wrap(
            f"sealed: {seconds_text(sealed.seconds)} a step, from {seconds_text(plan.interval[0])} to "
            f"{seconds_text(plan.interval[1])}; dominated by {sealed.dominant}"
        ),
        wrap(terms_text(sealed)),
        "",
        variants_text(plan.variants),
        "",
        wrap(f"computing, {seconds_text(plan.computing)}: {plan.computing_from}"),
    ]
    if plan.profiling:
        lines.append(wrap(f"recording the step took about {seconds_text(plan.profiling)} of it, which are taken off"))
    lines += [wrap(each) for each in _notes(plan)]
    lines += ["", *_sizes_text(plan), "", *assumed_text(profile)]
    if not job.busy and profile["compute", "busy"] == 1:
        lines.append(wrap("the trace is of an accelerator: computing is taken to leave the profile's cores free"))
    return "\n".join([*lines, *map(wrap, profile.notes)])


def _recorded(plan: JobPlan) -> str:
    job = plan.job
    kinds = sorted({each.operation.replace("_", "-") for each in job.collectives})
    took = (
        "no times" if plan.recorded is None else f"{seconds_text(plan.recorded)} a step, median of {len(job.timings)}"
    )
    return (
        f"trace of {job.backend}: {plan.recorded_workers:,} workers, {_count(job)} a step "
        f"({', '.join(kinds)}; {size_text(job.bytes)}), {took}"
    )


def _count(job: Job) -> str:
    return f"{len(job.collectives)} collective{'s' * (len(job.collectives) != 1)}"


def _notes(plan: JobPlan) -> Iterator[str]:
    job = plan.job
    if job.by_repetition:
        yield (
            f"steps: by what repeats, {_count(job)} each. If a step has more, call profiler.step() "
            "after each step and record again"
        )
    if job.left_out:
        yield f"left out: {job.left_out} steps with other collectives than most"
    if job.files == 1 and job.workers > 1 and plan.recorded is not None:
        yield "one rank's file: what it waited for slower ranks counts as communication. Give all ranks' files for more"


def _sizes_text(plan: JobPlan) -> list[str]:
    if not plan.sizes:
        return [wrap(f"bucket size: not predicted; {plan.why_no_sizes}")]
    recorded, best = plan.sizes[0], plan.best
    rows = [["bucket_cap_mb", "buckets", "sealed step"]]
    shown: dict[int, BucketSize] = {}
    for size in plan.sizes[1:]:
        shown.setdefault(size.buckets, size)
    rows.append(["as recorded", str(recorded.buckets), seconds_text(recorded.seconds)])
    rows += [[f"{size.cap_mib:g}", str(size.buckets), seconds_text(size.seconds)] for size in shown.values()]
    if best is None:
        advice = "recommended: keep the bucket size; no other saves 1 %"
    else:
        saved = share_text(1 - best.seconds / recorded.seconds)
        advice = f"recommended: bucket_cap_mb={best.cap_mib:g} saves {saved} of the sealed step"
    return [table(rows), *([wrap(plan.why_no_sizes)] if plan.why_no_sizes else []), wrap(advice)]


def size_text(size: int) -> str:
    """Return a number of bytes in MiB or KiB."""
    return f"{size / (1 << 20):,.1f} MiB" if size >= 1 << 20 else f"{size / 1024:.1f} KiB"


def plan_json(profile: Hardware, plan: JobPlan) -> dict[str, Any]:
    """Return the same as data."""
    best = plan.best
    return {
        "hardware": profile.name,
        "assumed": profile.assumed(),
        "recorded_workers": plan.recorded_workers,
        "trace": _job_json(plan.job),
        "recorded_seconds": plan.recorded,
        "profiler_seconds": plan.profiling,
        "computing": {"seconds": plan.computing, "from": plan.computing_from},
        "sealed": {
            "seconds": plan.variants["ringfence"].seconds,
            "interval": list(plan.interval),
            "dominant": plan.variants["ringfence"].dominant,
        },
        "variants": {name: step_json(step) for name, step in plan.variants.items()},
        "bucket_sizes": [
            {"bucket_mib": size.cap_mib, "buckets": size.buckets, "seconds": size.seconds} for size in plan.sizes
        ],
        "best_bucket_mib": best.cap_mib if best else None,
        "why_no_bucket_sizes": plan.why_no_sizes or None,
    }


def _job_json(job: Job) -> dict[str, Any]:
    return {
        "backend": job.backend,
        "workers": job.workers,
        "files": job.files,
        "computes_on_host": job.busy,
        "steps": len(job.timings),
        "steps_left_out": job.left_out,
        "steps_by_repetition": job.by_repetition,
        "gradients": len(job.gradients),
        "collectives": [each._asdict() for each in job.collectives],
    }


def add_check(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan traces`."""
    parser.add_argument("--quick", action="store_true", help="two small cases: less than a minute")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new folder for the traces")


def run_check(options: argparse.Namespace, profile: Hardware) -> int:
    """Record traces with Gloo on this machine, predict the sealed steps from them, and measure those."""
    from ringfence_lab.bench.trace_check import CASES, QUICK, Effort, check
    from ringfence_lab.progress import Progress

    if options.keep is not None and options.keep.exists():
        raise ConfigurationError(f"{options.keep} exists: name a new folder with --keep")
    cases = QUICK if options.quick else CASES
    effort = Effort(repeats=3) if options.quick else Effort()
    progress = Progress(len(cases))
    found = []
    try:
        for each in check(profile, cases, effort, options.keep, progress.say):
            found.append(each)
            progress.step(each.case.name)
    finally:
        progress.end()
    print(json.dumps(check_json(profile, found), indent=2) if options.json else check_text(found))
    return 0


def check_text(found: Sequence[Checked]) -> str:
    """Lay out predictions beside measurements, and their errors."""
    from ringfence_lab.bench.trace_check import errors

    rows = [["case", "recorded", "predicted", "interval", "measured", "error", "within", "error with --step"]]
    for each in found:
        interval = f"{seconds_text(each.middle('low'))} to {seconds_text(each.middle('high'))}"
        rows.append(
            [
                each.case.name,
                *(seconds_text(each.middle(field)) for field in ("recorded", "predicted")),
                interval,
                seconds_text(each.middle("sealed")),
                f"{each.ratio - 1:+.1%}",
                "yes" if each.within else "no",
                f"{each.ratio_by_step - 1:+.1%}",
            ]
        )
    said = {
        "predicted from the traces": errors(found, "ratio"),
        "predicted with --step, Gloo's step without the profiler": errors(found, "ratio_by_step"),
        "were the sealed step as long as the recorded one": errors(found, "unchanged"),
    }
    lines = [
        f"{what}: median error {share_text(middle)}, worst {share_text(worst)}"
        for what, (middle, worst) in said.items()
    ]
    return "\n".join([table(rows), "", *map(wrap, lines)])


def check_json(profile: Hardware, found: Sequence[Checked]) -> dict[str, Any]:
    """Return the same as data."""
    from ringfence_lab.bench.trace_check import errors

    def both(ratio: str) -> dict[str, float]:
        middle, worst = errors(found, ratio)
        return {"median_error": middle, "worst_error": worst}

    return {
        "hardware": profile.name,
        **both("ratio"),
        "by_step": both("ratio_by_step"),
        "unchanged": both("unchanged"),
        "cases": [each.as_json() for each in found],
    }
