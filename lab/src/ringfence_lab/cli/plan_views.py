"""The output of `ringfence plan`: predictions as tables for people and as data for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ringfence.cli.terminal import command, table, wrap
from ringfence_lab.plan import models, nccl
from ringfence_lab.plan.hardware import FIGURES, VARIANT_FIGURES

if TYPE_CHECKING:
    from ringfence_lab.plan.hardware import Hardware
    from ringfence_lab.plan.models import Model
    from ringfence_lab.plan.recommend import Advice, Plan
    from ringfence_lab.plan.steps import Question, StepCost

_NAMES = {
    "nccl": "NCCL, unprotected",
    "gloo": "plaintext Gloo",
    "plaintext": "plaintext, same schedules",
    "ringfence-unsealed": "ringfence without sealing",
    "ringfence": "ringfence",
    "hop-by-hop": "sealed hop by hop",
}


_NCCL = f"in the clear, GPUs outside confidential mode; {nccl.SOURCE}"


def seconds_text(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def share_text(share: float) -> str:
    return f"{share:.0%}" if abs(share) >= 0.095 else f"{share:.1%}"


def question_text(question: Question) -> str:
    model = question.model
    how = "DDP's default buckets" if question.cap_mib is None else f"buckets of {question.cap_mib:g} MiB"
    if question.strategy == "fsdp":
        how = f"FSDP with {question.blocks} block{'s' * (question.blocks > 1)} in a unit"
    width = {2: "bfloat16", 4: "float32"}[question.bytes_each]
    what = (
        f"{model.name} ({model.elements / 1e9:.3g} G parameters, {width}), {question.samples} samples a worker, {how}"
    )
    return f"{what}, 2 channels between machines" if question.channels == 2 else what


def plan_text(profile: Hardware, plan: Plan) -> str:
    """Lay out one point: the variants, what the sealed step is made of, and what to change."""
    workers = f"{plan.question.workers:,} worker{'s' * (plan.question.workers > 1)}"
    lines = [wrap(f"{question_text(plan.question)}, {workers}"), wrap(f"on {profile.title}")]
    if not profile["inside", "sealed"] and (per_machine := int(profile["node", "workers"])) > 1:
        shared = min(per_machine, plan.question.workers)
        lines.append(wrap(f"{shared:,} workers on a machine, which share memory; sealed between machines"))
    if plan.question.model.name not in models.names():
        lines.append(wrap(f"model: {plan.question.model.source}"))
    lines += ["", variants_text(plan.variants), "", wrap(terms_text(plan.variants["ringfence"])), ""]
    what = "confidential mode and sealing cost" if profile["device", "copy_rate"] else "sealing costs"
    lines.append(wrap(f"{what} {plan.overhead - 1:+.1%} over the same schedules in the clear"))
    if "nccl" in plan.variants:
        times = plan.variants["ringfence"].seconds / plan.variants["nccl"].seconds
        lines.append(wrap(f"ringfence takes {times:.1f} times as long as NCCL, which is unprotected: {_NCCL}"))
    if plan.loses:
        lines.append(wrap(f"ringfence takes {plan.loses}"))
    lines += ["", *_recommended(plan), "", *assumed_text(profile)]
    return "\n".join([*lines, *map(wrap, profile.notes)])


def _recommended(plan: Plan) -> list[str]:
    if not plan.advice:
        return ["recommended: change nothing; no other setting saves 1 %"]
    rows = [[f"  {each.lever}", each.value, share_text(each.gain), each.why] for each in plan.advice]
    return [
        "recommended:",
        table([["  lever", "set it to", "saves", "because"], *rows]),
        wrap(
            f"with it: {seconds_text(plan.tuned['ringfence'].seconds)} a step, sealing "
            f"{plan.tuned_overhead - 1:+.1%} over plaintext with {_best(plan.question)}"
        ),
    ]


def _short(advice: Advice) -> str:
    return "no resharding" if advice.lever == "reshard_after_forward" else advice.value


def _best(question: Question) -> str:
    return f"the {'units' if question.strategy == 'fsdp' else 'bucket size'} best for it"


def assumed_text(profile: Hardware) -> list[str]:
    """Return how many figures of a profile are assumed, and the command that prints them."""
    return [
        f"{len(profile.assumed())} of {len(FIGURES)} figures of this profile are assumed:",
        command(f"ringfence plan hardware {profile.name}"),
    ]


def variants_text(variants: dict[str, StepCost]) -> str:
    """Lay out the variants of a step, a row each."""
    plain = variants["plaintext"].seconds
    rows = [["", "step", "computing", "communication", "of it hidden", "over plaintext", "dominated by"]]
    for name, step in variants.items():
        whole = step.communication.seconds
        hidden = 1 - step.exposed / whole if whole else 0.0
        rows.append(
            [
                _NAMES[name],
                seconds_text(step.seconds),
                seconds_text(step.compute),
                seconds_text(whole),
                share_text(max(0.0, hidden)),
                f"{step.seconds / plain:.2f}",
                step.dominant,
            ]
        )
    return table(rows)


def terms_text(step: StepCost) -> str:
    """The sealed step by term, largest first."""
    parts = sorted(((value, term) for term, value in step.terms.items() if value > 0.001 * step.seconds), reverse=True)
    shown = ", ".join(f"{term} {share_text(value / step.seconds)}" for value, term in parts)
    return f"the sealed step: {shown}; its collectives are bound by the {step.communication.bound}"


def sweep_text(profile: Hardware, plans: Sequence[Plan]) -> str:
    """All scales: the sealed step, its cost over plaintext, and what is recommended there."""
    clear = [name for name in ("nccl", "plaintext") if name in plans[0].variants]
    rows = [
        [
            "workers",
            *("NCCL" if name == "nccl" else "plain" for name in clear),
            "sealed",
            "over it",
            "hop by hop",
            "bound by",
            "tuned",
            "over it",
            "best setting" if plans[0].question.strategy == "fsdp" else "best bucket",
        ]
    ]
    for plan in plans:
        sealed = plan.variants["ringfence"]
        rows.append(
            [
                f"{plan.question.workers:,}",
                *(seconds_text(plan.variants[name].seconds) for name in clear),
                seconds_text(sealed.seconds),
                f"{plan.overhead:.2f}",
                seconds_text(plan.variants["hop-by-hop"].seconds),
                "copies" if sealed.dominant == "host-device copy" else sealed.dominant,
                seconds_text(plan.tuned["ringfence"].seconds),
                f"{plan.tuned_overhead:.2f}",
                ", ".join(_short(each) for each in plan.advice) or "asked",
            ]
        )
    head = f"{wrap(question_text(plans[0].question))}\n{wrap(f'on {profile.title}')}\n"
    foot = (
        "plain: plaintext over the same schedules. sealed: ringfence. tuned: sealed and plaintext each with "
        f"{_best(plans[0].question)}."
    )
    if "nccl" in clear:
        foot += f" NCCL: unprotected, {_NCCL}."
    lost = [wrap(f"{plan.question.workers:,} workers: ringfence takes {plan.loses}.") for plan in plans if plan.loses]
    return "\n".join([head, table(rows), "", wrap(foot), *lost, *assumed_text(profile)])


def plans_json(profile: Hardware, plans: Sequence[Plan]) -> dict[str, Any]:
    return {
        "hardware": profile.name,
        "assumed": profile.assumed(),
        "points": [
            {
                "model": plan.question.model.name,
                "workers": plan.question.workers,
                "source": plan.question.model.source,
                "strategy": plan.question.strategy,
                "bucket_mib": plan.question.cap_mib,
                "variants": {name: step_json(step) for name, step in plan.variants.items()},
                "sealing_over_plaintext": plan.overhead,
                "loses": plan.loses,
                "advice": [asdict(each) for each in plan.advice],
                "tuned": {name: step_json(step) for name, step in plan.tuned.items()},
                "tuned_over_plaintext": plan.tuned_overhead,
            }
            for plan in plans
        ],
    }


def step_json(step: StepCost) -> dict[str, Any]:
    return {
        "seconds": step.seconds,
        "compute": step.compute,
        "communication": step.communication.seconds,
        "buckets": step.buckets,
        "terms": step.terms,
        "dominant": step.dominant,
        "bound": step.communication.bound,
    }


def models_text(found: Sequence[Model]) -> str:
    rows = [["model", "parameters", "GFLOP forward", "sample", "architecture"]]
    for each in found:
        name, _, details = each.source.partition(";")[0].partition(", ")
        architecture = f"{name} ({details})"
        sample = each.sample.removeprefix("a sequence of ")
        flops = f"{each.forward_flops / 1e9:,.1f}"
        rows.append([each.name, f"{each.elements:,}", flops, sample, architecture])
    sources = dict.fromkeys(each.source.partition(";")[2].strip() for each in found)
    return f"{table(rows)}\n\n{wrap('source: ' + '; '.join(sources))}"


def models_json(found: Sequence[Model]) -> list[dict[str, Any]]:
    return [
        {
            "name": each.name,
            "parameters": each.elements,
            "tensors": len(each.parameters),
            "forward_flops": each.forward_flops,
            "sample": each.sample,
            "source": each.source,
        }
        for each in found
    ]


def profiles_text(profiles: Sequence[Hardware]) -> str:
    rows = [["profile", "assumed", "what it is"]]
    rows += [[each.name, f"{len(each.assumed())} of {len(FIGURES)}", each.title] for each in profiles]
    return table(rows)


def profile_text(profile: Hardware) -> str:
    """Lay out every figure with its unit and its source."""
    lines = [wrap(profile.title), ""]
    for (section, key), figure in profile.figures.items():
        unit, _, what = FIGURES[section, key]
        origin = f"assumed: {figure.origin}" if figure.assumed else figure.origin
        lines.append(wrap(f"{section}.{key} = {figure.value:g} {unit}".rstrip() + f"  ({what})", rest="    "))
        lines.append(wrap(origin, "    "))
    for variant, fitted in profile.variants.items():
        lines.append(
            wrap(f"{variant}: " + ", ".join(f"{key} {value:.4g}" for key, value in fitted.items()), rest="    ")
        )
    if profile.variants:
        lines += [wrap(f"{key}: {what}", "    ", "      ") for key, what in VARIANT_FIGURES.items()]
    return "\n".join([*lines, *map(wrap, profile.notes)])


def profile_json(profile: Hardware) -> dict[str, Any]:
    figures = {f"{a}.{b}": {"unit": FIGURES[a, b][0], **asdict(figure)} for (a, b), figure in profile.figures.items()}
    variants = {variant: dict(fitted) for variant, fitted in profile.variants.items()}
    return {
        "name": profile.name,
        "title": profile.title,
        "figures": figures,
        "variants": variants,
        "notes": list(profile.notes),
    }
