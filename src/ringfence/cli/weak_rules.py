"""Rules of a policy that are valid and keep out less than they seem to: `ringfence policy check` names them."""

from __future__ import annotations

from collections.abc import Iterator

from ringfence.admission.policy_file.policy_file import PolicyFile, Rule, Rules
from ringfence.admission.proofs import snp, tdx
from ringfence.admission.proofs.kinds import hardware_rules

CPU_PROOFS = {"tdx", "snp", "azure_tdx", "azure_snp"}


def weaknesses(policy: PolicyFile) -> list[str]:
    """Return a sentence for each."""
    found = [f"rule {number}: {text}" for number, rule in enumerate(policy.rules, 1) for text in _of_rule(rule)]
    asked = [{(kind, rules.content()) for kind, rules in rule.proofs} for rule in policy.rules]
    for number, proofs in enumerate(asked, 1):
        less = [other for other, others in enumerate(asked, 1) if others < proofs]
        found += [f"rule {number}: keeps nobody out, since rule {other} asks for less" for other in less]
    return found


def _of_rule(rule: Rule) -> Iterator[str]:
    kinds = {kind for kind, _ in rule.proofs}
    if "nvidia" in kinds and not kinds & CPU_PROOFS:
        yield "a GPU does not attest the machine that it is in: add tdx or snp"
    for kind, rules in rule.proofs:
        yield from (f"{kind}: {text}" for text in _of_hardware(hardware_rules(rules), measures=kind in ("tdx", "snp")))


def _of_hardware(rules: Rules, measures: bool) -> Iterator[str]:
    """Yield what is weak about a hardware report. `measures`: it measures the guest itself, and no vTPM does."""
    if isinstance(rules, tdx.Rules):
        _, loader, kernel, _ = rules.rtmrs
        if measures and not (loader and kernel):
            yield "rtmr1 and rtmr2 are not both pinned: any kernel that the firmware starts is admitted"
        if old := [status for status in rules.statuses if status.startswith("OutOfDate")]:
            yield f"{' and '.join(old)}: platforms that lack Intel's fixes are admitted"
    elif isinstance(rules, snp.Rules):
        for line, minimum in rules.minimum_tcb:
            if not any(value for _, value in minimum.parts):
                yield f"minimum_tcb of {line} is zero: firmware without AMD's fixes is admitted"
