"""Every kind of proof that a policy can ask for: its number, its name, the reader of its table and its verifier.

This is the only way from a policy file to a verifier. It passes rules and a clock, and nothing else: the roots of the tests'
evidence cannot be set by a policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from ringfence.admission.policy import Clock, Policy, Verifier
from ringfence.admission.policy_file.policy_file import PolicyFile, ReadRules, Rule, Rules, read_policy
from ringfence.admission.policy_file.toml_table import ListFolder, Read, no_folders
from ringfence.admission.proofs import (
    azure,
    bundle,
    certificate,
    crl,
    freshness,
    identity,
    nvidia,
    ocsp_status,
    secret,
    snp,
    tdx,
    tdx_collateral,
    token,
)
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.errors import ConfigurationError, PolicyError


@dataclass(frozen=True)
class ProofKind:
    """One kind of proof. `verifier` is None for the shared secret, whose verifier needs the secret itself."""

    number: int
    read_rules: ReadRules
    verifier: Callable[[Any, Clock], Verifier] | None


KINDS: Final[dict[str, ProofKind]] = {
    "secret": ProofKind(1, secret.read_rules, None),
    "certificate": ProofKind(2, certificate.read_rules, certificate.CertificateVerifier),
    "tdx": ProofKind(tdx.KIND, tdx.read_rules, tdx.verifier),
    "snp": ProofKind(snp.KIND, snp.read_rules, snp.verifier),
    "nvidia": ProofKind(nvidia.KIND, nvidia.read_rules, nvidia.verifier),
    "token": ProofKind(token.KIND, token.read_rules, token.verifier),
    "azure_snp": ProofKind(azure.SNP_KIND, azure.read_snp_rules, azure.snp_verifier),
    "azure_tdx": ProofKind(azure.TDX_KIND, azure.read_tdx_rules, azure.tdx_verifier),
}


def read(
    text: bytes,
    files: Read,
    where: str = "the policy",
    list_folder: ListFolder = no_folders,
    memory: freshness.Memory = freshness.PROCESS,
) -> PolicyFile:
    """Read a policy file that may ask for any kind of proof. `memory`: of the newest lists, to notice an older one."""
    file = read_policy(text, files, {name: kind.read_rules for name, kind in KINDS.items()}, where, list_folder)
    _check_members(file, where)
    return _share_revocations(file, where, memory)


def _check_members(file: PolicyFile, where: str) -> None:
    """Check that each worker of a private sum is one that its certificate names, and no other worker can pass for it."""
    if file.private_sum is not None and not names_stand_for_one_rank(file):
        raise PolicyError(
            f"{where}: private_sum: a lying worker could take another one's place: ask for a certificate in every rule, and "
            "bind its name to one rank, with {rank} and without * in each pattern of ids"
        )


def _share_revocations(file: PolicyFile, where: str, memory: freshness.Memory = freshness.PROCESS) -> PolicyFile:
    """Give each rule the collateral and the revocations of all rules.

    Any one rule admits a worker, so a revocation in one of them must count in the others.
    """
    found = [hardware_rules(rules) for rule in file.rules for _, rules in rule.proofs]
    collateral = dict.fromkeys(each for rules in found if isinstance(rules, tdx.Rules) for each in rules.collateral)
    revoked = dict.fromkeys(each for rules in found if isinstance(rules, snp.Rules) for each in rules.revoked)
    serials = frozenset(each for rules in found if isinstance(rules, nvidia.Rules) for each in rules.revoked)
    lists = crl.CrlRule.merge(
        (rules.revocation for rules in found if isinstance(rules, certificate.Rules) and rules.revocation), memory
    )
    responses = ocsp_status.OcspRule.merge(
        (rules.revocation for rules in found if isinstance(rules, nvidia.Rules) and rules.revocation), memory
    )
    try:
        tdx_collateral.check_agreement(collateral)
    except ValueError as error:
        raise PolicyError(f"{where}: collateral: {error}") from None

    def shared(rules: Rules) -> Rules:
        inner = hardware_rules(rules)
        if isinstance(inner, tdx.Rules):
            inner = replace(inner, listed=tuple(collateral))
        elif isinstance(inner, snp.Rules):
            inner = replace(inner, listed=tuple(revoked))
        elif isinstance(inner, certificate.Rules):
            return replace(inner, shared=lists)
        else:
            return replace(inner, revoked=serials, shared=responses) if isinstance(inner, nvidia.Rules) else inner
        return replace(rules, hardware=inner) if isinstance(rules, azure.Rules) else inner

    rules = (replace(rule, proofs=tuple((name, shared(each)) for name, each in rule.proofs)) for rule in file.rules)
    return replace(file, rules=tuple(rules))


def hardware_rules(rules: Rules) -> Rules:
    """Return the rules for the hardware report: those of [admit.snp] or [admit.tdx], also inside a table for Azure."""
    return rules.hardware if isinstance(rules, azure.Rules) else rules


def reads_lists(file: PolicyFile) -> bool:
    """Whether a rule names lists of revoked certificates or OCSP responses, which the digest does not cover."""
    found = (rules for rule in file.rules for _, rules in rule.proofs)
    return any(isinstance(each, certificate.Rules | nvidia.Rules) and each.revocation is not None for each in found)


def digest_of(file: PolicyFile) -> bytes:
    """Return the digest of the policy that `policy_of` returns, without a secret or a clock."""
    return file.digest_with(_content(rule) for rule in file.rules)


def rules_for_any_rank(file: PolicyFile) -> list[int]:
    """Return the numbers of the rules, from 1, that bind no certificate name to a rank.

    A worker that such a rule admits can be listed as any other, so its roster can be one of two (spec/admission.md).
    """

    def binds(rule: Rule) -> bool:
        return any(isinstance(rules, certificate.Rules) and rules.binds_ranks for _, rules in rule.proofs)

    return [number for number, rule in enumerate(file.rules, 1) if not binds(rule)]


def names_stand_for_one_rank(file: PolicyFile) -> bool:
    """Return whether no certificate name can stand for two ranks, under whichever rule. Only then are two rosters detected: a
    worker can be listed as any rank that its name stands for."""
    patterns: list[str] = []
    for rule in file.rules:
        found = [rules.ids for _, rules in rule.proofs if isinstance(rules, certificate.Rules)]
        if not found:
            return False
        patterns += found[0]
    return identity.stand_for_one_rank(patterns)


def policy_of(file: PolicyFile, clock: Clock, shared: SharedSecret | None) -> Policy:
    """Return the policy that a file describes. Raises ConfigurationError if it needs a secret and `shared` is None."""
    verifiers = tuple(bundle.verifier_for(_verifiers(rule, clock, shared)) for rule in file.rules)
    members = tuple(rule.member for rule in file.rules) if file.members else ()
    return Policy(verifiers, members, **file.terms())


def _verifiers(rule: Rule, clock: Clock, shared: SharedSecret | None) -> list[Verifier]:
    found: list[Verifier] = []
    for name, rules in rule.proofs:
        make = KINDS[name].verifier
        if make is not None:
            found.append(make(rules, clock))
        elif shared is not None:
            found.append(shared)
        else:
            raise ConfigurationError(
                "the policy has a rule with [admit.secret], and every worker needs the secret to verify it: "
                "set RINGFENCE_SECRET_FILE on every worker"
            )
    return found


def _content(rule: Rule) -> tuple[int, bytes, str]:
    parts = sorted((KINDS[name].number, rules.content()) for name, rules in rule.proofs)
    kind, content = parts[0] if len(parts) == 1 else (bundle.KIND, bundle.encode(parts))
    return kind, content, rule.member
