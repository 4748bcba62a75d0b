"""The policy file: which workers may join a run. One TOML file, of which every worker has a copy.

    version = 1
    min_workers = 8
    max_session_age = "24h"

    [[admit]]                  # any one rule admits
    [admit.certificate]        # inside a rule all proofs are needed
    ca = "ca.pem"
    trust_domain = "example.org"
    ids = "spiffe://example.org/trainer/*"

The module that verifies a kind of proof also reads its table; this module combines them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from ringfence.admission.policy import PolicyTerms, PrivateSumTerms
from ringfence.admission.policy_file.toml_table import ListFolder, Read, TomlTable, no_folders, parse, quoted
from ringfence.keys import FORWARDED, KEY_AGREEMENTS, RECORDS, SAME_HOST

VERSION: Final = 1
RULES: Final = 64
WORKERS: Final = 1 << 20
INSIDE_BACKENDS: Final = ("nccl", "gloo")  # that a policy may permit between workers of one machine
MEMBER: Final = re.compile(r"[a-zA-Z0-9._-]{1,64}")
COLLUDING: Final = 32  # members to withstand, at most: each of them costs a mask
ENDORSING: Final = {"secret", "certificate"}  # proofs with a key that can sign the worker's entry


class Rules(Protocol):
    """The table of one kind of proof, with the files that it names."""

    def content(self) -> bytes:
        """Return a canonical encoding: equal for two tables only if they give the same verdicts."""

    def explain(self) -> list[str]:
        """Describe what it admits, one line each."""


ReadRules = Callable[[TomlTable], Rules]


@dataclass(frozen=True)
class Rule:
    """One `[[admit]]`: a worker is admitted if it presents all of these proofs."""

    proofs: tuple[tuple[str, Rules], ...]  # with the names of their tables
    note: str | None = None  #               for people
    member: str = ""  #                      whose workers it admits, for private sums


@dataclass(frozen=True)
class PolicyFile(PolicyTerms):
    """A policy file, with the files that it names read in."""

    rules: tuple[Rule, ...]
    name: str = field(default="", compare=False)  # its own, in its folder
    contents: Mapping[str, bytes] = field(default_factory=dict, compare=False, repr=False)  # of it and of those files

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of proof that any rule asks for."""
        return tuple(dict.fromkeys(kind for rule in self.rules for kind, _ in rule.proofs))

    @property
    def members(self) -> tuple[str, ...]:
        """The members that the rules name, each once, in alphabetical order."""
        return tuple(sorted({rule.member for rule in self.rules} - {""}))


def explain(policy: PolicyFile) -> list[str]:
    """Describe what a policy admits, one line each."""
    count = len(policy.rules)
    lines = [
        "A worker is admitted if it meets the rule:"
        if count == 1
        else f"A worker is admitted if it meets any of {count} rules:"
    ]
    for number, rule in enumerate(policy.rules, 1):
        lines += ["", f"{number}. {rule.note or ' and '.join(kind for kind, _ in rule.proofs)}"]
        for kind, rules in rule.proofs:
            lines.append(f"   {kind}")
            lines += [f"     {line}" for line in rules.explain()]
    lines += ["", "No other worker is admitted."]
    if any(not ENDORSING & {kind for kind, _ in rule.proofs} for rule in policy.rules):
        lines += [
            "Hardware evidence does not sign roster entries: a worker that presents only evidence is listed by the workers "
            "that verified it, until it presents the evidence again on each link. If a rule also requires a certificate, a "
            "key that this policy admits signs each entry.",
        ]
    if policy.min_workers > 1:
        lines.append(f"A run with fewer than {policy.min_workers} workers does not begin.")
    if policy.max_session_age is not None:
        lines.append(f"After {duration_text(policy.max_session_age)} all workers must be verified again.")
    if policy.verify_every is not None:
        lines.append(
            f"Every {duration_text(policy.verify_every)} each worker proves itself again to its neighbours in the tree, unless "
            "the shared secret alone admitted it (verify_every)."
        )
    if policy.key_agreement != KEY_AGREEMENTS[0]:
        lines += [
            "Workers may agree on keys without post-quantum cryptography (key_agreement): an attacker who records their "
            "connections now could decrypt them with a future quantum computer.",
        ]
    if policy.inside_machine:
        lines += [
            f"A group that asks for {' or '.join(policy.inside_machine)} uses it without sealing if all its members prove to "
            "be on one machine and of one user (inside_machine). Between machines everything is sealed.",
        ]
    lines.append(
        "Workers of one user on one machine exchange tensors through memory that they share, without sealing (same_host). "
        "Between machines everything is sealed."
        if policy.same_host == SAME_HOST[0]
        else "Workers on one machine seal what they exchange, as between machines (same_host)."
    )
    if policy.forwarded != FORWARDED[0]:
        lines.append(
            "Each link authenticates the ciphertext that it forwards (forwarded): a member of a group that is not on the path "
            "cannot alter it."
        )
    if policy.private_sum is not None:
        terms, names = policy.private_sum, policy.members
        lines.append(
            f"A private sum is over {'all' if terms.min_members == len(names) else f'{terms.min_members} or more'} of the "
            f"members {', '.join(names)}, which learn the sum: up to {terms.colluding} of them together learn nothing else "
            "(private_sum)."
        )
    if policy.record != RECORDS[0]:
        lines.append("Every worker writes a signed record of the run, and a run without one fails (record).")
    return lines


def duration_text(seconds: int) -> str:
    """Return a duration in words, such as "12 hours"."""
    units = ((86400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))
    length, name = next(unit for unit in units if seconds % unit[0] == 0)
    count = seconds // length
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def read_policy(
    text: bytes,
    read: Read,
    kinds: Mapping[str, ReadRules],
    where: str = "the policy",
    list_folder: ListFolder = no_folders,
) -> PolicyFile:
    """Read a policy; `kinds` maps the names of tables to their readers. Raises PolicyError, which names the place."""
    root = parse(text, read, where, list_folder)
    root.number("version", least=VERSION, most=VERSION)
    terms = PolicyTerms(
        min_workers=root.number("min_workers", 1, least=1, most=WORKERS),
        max_session_age=root.duration("max_session_age", None),
        verify_every=root.duration("verify_every", None),
        key_agreement=root.text("key_agreement", KEY_AGREEMENTS[0], allowed=KEY_AGREEMENTS),
        inside_machine=root.texts("inside_machine", (), allowed=INSIDE_BACKENDS),
        same_host=root.text("same_host", SAME_HOST[0], allowed=SAME_HOST),
        forwarded=root.text("forwarded", FORWARDED[0], allowed=FORWARDED),
        record=root.text("record", RECORDS[0], allowed=RECORDS),
    )
    private_sum = root.table("private_sum", None)
    tables = root.tables("admit")
    if len(tables) > RULES:
        raise root.error(f"{len(tables)} rules, where at most {RULES} are allowed")
    rules = tuple(_rule(table, kinds) for table in tables)
    members = {rule.member for rule in rules} - {""}
    if private_sum is not None:
        terms = replace(terms, private_sum=_private_sum(private_sum, len(members)))
    elif members:
        raise root.error("a rule has a member, and there is no [private_sum]")
    root.done()
    if terms.verify_every is not None and all([kind for kind, _ in rule.proofs] == ["secret"] for rule in rules):
        raise root.error("verify_every: a shared secret cannot be revoked; ask for a certificate or evidence as well")
    return PolicyFile(rules, **terms.terms())


def _private_sum(table: TomlTable, members: int) -> PrivateSumTerms:
    colluding = table.number("colluding", 1, least=1, most=COLLUDING)
    least = colluding + 2  # two members are left: the sum of one would be its contribution
    if members < least:
        raise table.error(
            f"the rules name {members} members, and with {colluding} colluding at least {least} are needed: give the "
            "[[admit]] rules of each a member of its own"
        )
    min_members = table.number("min_members", members, least=least, most=members)
    table.done()
    return PrivateSumTerms(colluding, min_members)


def _rule(table: TomlTable, kinds: Mapping[str, ReadRules]) -> Rule:
    note, member = table.text("note", None), table.text("member", "")
    if member and MEMBER.fullmatch(member) is None:
        raise table.error(f"member must be 1 to 64 of a-z, A-Z, 0-9, '.', '_', '-'; it is {quoted(member)}")
    proofs = []
    for kind, read_rules in kinds.items():
        inner = table.table(kind, None)
        if inner is not None:
            proofs.append((kind, read_rules(inner)))
    table.done()
    if not proofs:
        raise table.error("a rule without a proof would admit every worker; ask for one or more of " + ", ".join(kinds))
    return Rule(tuple(proofs), note, member)
