"""`ringfence policy new | check | explain`: write a policy, check it, and print what it means."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.cli.templates import HEAD, RULE, TABLES
from ringfence.cli.terminal import Commands, layout_line, say
from ringfence.errors import ConfigurationError
from ringfence.release import PAGES

if TYPE_CHECKING:
    from ringfence.admission.policy_file.policy_file import PolicyFile, Rules

NEW = """\
Write a policy to a new file, with one rule for each --admit and one table for each kind of proof in it.

A worker that meets any one rule is admitted; to meet a rule it needs all its proofs. Kinds: {kinds}.
Values that only you know are marked FILL IN; `ringfence policy check` lists what is still missing.
"""

NEW_EXAMPLES = """\
examples:
  ringfence policy new policy.toml                 a certificate
  ringfence policy new p.toml --admit secret       a shared secret
  ringfence policy new p.toml --admit tdx+nvidia   TDX and GPU evidence
  ringfence policy new p.toml --admit tdx --admit snp
                                                   either of the two
"""

CHECK = """\
Read a policy and all files that it names, as a worker does, and report what is wrong with them.

The digest covers everything that decides whom the policy admits. Two workers admit each other only if their digests are
equal; if they differ, the error names the first 16 digits of both.

It also prints rules that keep out less than they seem to, how old lists of revoked certificates and OCSP responses are, and
what cannot be revoked under the policy.

exit codes:
  0  the policy is valid
  1  something that it names has expired (an authority, TDX collateral, a list of revoked certificates, OCSP responses),
     or its issuer did not sign it
  2  the policy cannot be used

Some signatures are checked later, when a worker presents the certificates for it: on TDX collateral, on lists of intermediate
authorities, and on OCSP responses.
"""

EXPLAIN = """\
Print in plain words which workers a policy admits.
"""

SOON_DAYS = 30


def add_to(commands: Commands) -> None:
    """Add `policy new`, `policy check` and `policy explain` to the command line."""
    policy = commands.add_parser("policy", help="write, check or explain a policy: who may join a run")
    actions = policy.add_subparsers(title="actions", metavar="ACTION", required=True)
    description = NEW.format(kinds=", ".join(TABLES))
    new = actions.add_parser("new", help="write a new policy", description=description, epilog=NEW_EXAMPLES)
    new.add_argument("file", type=Path, metavar="FILE", help="the file to write; must not exist")
    new.add_argument(
        "--admit",
        action="append",
        metavar="KIND[+KIND...]",
        help="a rule: the proofs that it requires (default: certificate)",
    )
    new.add_argument(
        "--ca",
        default="ca.pem",
        metavar="FILE",
        help="file of trusted authorities, relative to the policy (default: ca.pem)",
    )
    new.add_argument("--trust-domain", metavar="NAME", help="trust domain (default: that of the authorities)")
    new.set_defaults(run=run_new)
    check = actions.add_parser("check", help="check a policy and the files that it names", description=CHECK)
    check.add_argument("file", type=Path, metavar="FILE")
    check.add_argument("--json", action="store_true", help="print the result as JSON")
    check.set_defaults(run=run_check)
    explain = actions.add_parser("explain", help="print whom a policy admits", description=EXPLAIN)
    explain.add_argument("file", type=Path, metavar="FILE")
    explain.set_defaults(run=run_explain)


# -- new ------------------------------------------------------------------------------------------------------------


def run_new(options: argparse.Namespace) -> int:
    """Write the policy and print the next steps."""
    from ringfence.admission.proofs.identity import is_trust_domain
    from ringfence.config.private_files import write_new

    rules = [_kinds(rule) for rule in options.admit or ["certificate"]]
    trust_domain = options.trust_domain or _trust_domain(options.file.parent / options.ca)
    if not is_trust_domain(trust_domain):
        raise ConfigurationError(f"{trust_domain!a} is not a trust domain: use a name such as example.org")
    words = {"ca": json.dumps(options.ca), "trust_domain": trust_domain}
    text = HEAD + "".join(RULE + "".join(TABLES[kind].format(**words) for kind in rule) for rule in rules)
    write_new(options.file, text.encode(), 0o644, "a policy")
    say(f"Wrote {options.file}. Review it, check it, and copy it to every worker with the files that it names:")
    print(f"  ringfence policy check {options.file}")
    print(f"  export RINGFENCE_POLICY={options.file.absolute()}")
    return 0


def _kinds(rule: str) -> list[str]:
    kinds = rule.split("+")
    if not set(kinds) <= set(TABLES) or len(set(kinds)) != len(kinds):
        raise ConfigurationError(f"--admit {rule}: join different kinds with +, from {', '.join(TABLES)}")
    return [kind for kind in TABLES if kind in kinds]


def _trust_domain(ca: Path) -> str:
    """Return the trust domain of the authority in a file, or an example to be changed."""
    from cryptography import x509

    from ringfence.cli.dev_ca import trust_domain_of

    try:
        certificates = x509.load_pem_x509_certificates(ca.read_bytes())
    except (OSError, ValueError):
        return "example.org"
    return next(filter(None, map(trust_domain_of, certificates)), "example.org")


# -- check and explain ----------------------------------------------------------------------------------------------


def run_check(options: argparse.Namespace) -> int:
    """Read the policy as a worker does, and print its digest and what is wrong with it."""
    from ringfence.admission.proofs.kinds import digest_of, names_stand_for_one_rank, rules_for_any_rank
    from ringfence.cli import revocation_views, weak_rules
    from ringfence.config.settings import load_policy

    policy = load_policy(options.file)
    any_rank, one_rank = rules_for_any_rank(policy), names_stand_for_one_rank(policy)
    digest = digest_of(policy).hex()
    expired, soon = _ending(policy, time.time())
    wrong = _not_genuine(policy, time.time())
    statuses, stale = revocation_views.statuses(policy, time.time())
    open_ends = revocation_views.not_revocable(policy)
    forged, missing = revocation_views.unusable(policy)
    wrong, expired = [*wrong, *forged], [*expired, *stale]
    in_order = not (expired or wrong or missing)
    rules = [[kind for kind, _ in rule.proofs] for rule in policy.rules]
    weak = weak_rules.weaknesses(policy)
    if options.json:
        found = {"digest": digest, "rules": rules, "expired": expired, "expires_soon": soon, "not_genuine": wrong}
        limits = {
            **policy.terms(),
            "private_sum": None if policy.private_sum is None else asdict(policy.private_sum),
            "members": list(policy.members),
            "rules_for_any_rank": any_rank,
            "two_rosters_are_detected": one_rank,
            "weak": weak,
        }
        revocation = {"missing": missing, "lists": [each._asdict() for each in statuses], "not_revocable": open_ends}
        print(json.dumps({**found, "in_order": in_order, **limits, **revocation}))
        return 0 if in_order else 1
    for name in expired:
        say(f"expired: {name}", "!!  ")
    for name in soon:
        say(f"expires within {SOON_DAYS} days: {name}", "    ")
    for name in wrong:
        say(f"not genuine: {name}", "!!  ")
    for name in missing:
        say(f"missing: {name}", "!!  ")
    fault = "is not genuine" if wrong else "has expired" if expired else "is missing"
    say(f"{options.file} is valid." if in_order else f"{options.file} relies on a file that {fault}.")
    say(", or by ".join(" and ".join(rule) for rule in rules), "  admits by  ")
    if policy.inside_machine:
        say(f"{', '.join(policy.inside_machine)} without sealing inside one machine", "  permits    ")
    say(f"{_ranks(any_rank, one_rank)} ({PAGES}/security/limitations.html)", "  ranks      ")
    for text in weak:
        say(text, "  weak       ")
    print(f"  digest     {digest[:16]} {digest[16:]}")
    for status in statuses:
        say(str(status), "  list       ")
    for name in open_ends:
        say(name, "  not revocable  ")
    return 0 if in_order else 1


def _ranks(any_rank: list[int], one_rank: bool) -> str:
    """Say what names stand for. `any_rank` are rules that bind none."""
    if one_rank:
        return "each name stands for one rank: two rosters are detected"
    if any_rank:
        return f"rule {', '.join(map(str, any_rank))} binds no name to a rank: two rosters are not detected"
    return "a name can stand for several ranks: two rosters are not detected"


def _ending(policy: PolicyFile, now: float) -> tuple[list[str], list[str]]:
    """Return what the policy relies on that has expired, and what expires soon."""
    ends = dict(end for rule in policy.rules for _, rules in rule.proofs for end in _ends(rules))
    expired = [name for name, end in ends.items() if end < now]
    soon = [name for name, end in ends.items() if now <= end < now + SOON_DAYS * 86400]
    return expired, soon


def _ends(rules: Rules) -> Iterator[tuple[str, float]]:
    from ringfence.admission.proofs import authorities, certificate, snp, tdx
    from ringfence.admission.proofs.kinds import hardware_rules

    rules = hardware_rules(rules)
    if isinstance(rules, certificate.Rules):
        for each in rules.authorities:
            yield f"authority {authorities.describe(each)}", authorities.expiry(each)
    elif isinstance(rules, tdx.Rules):
        for collateral in rules.collateral:
            with contextlib.suppress(ValueError):  # verification refuses a date that cannot be read
                end = datetime.datetime.fromisoformat(collateral.next_update).timestamp()
                name = f"TDX collateral for platforms {collateral.fmspc} of the {collateral.ca} CA"
                yield f"{name}, until {collateral.next_update}", end
    elif isinstance(rules, snp.Rules):
        for revoked in rules.revoked:
            yield f"{revoked.describe()}, until {revoked.end:%Y-%m-%d}", revoked.end.timestamp()


def _not_genuine(policy: PolicyFile, now: float) -> list[str]:
    """Return AMD's lists that workers would reject. TDX collateral is verified together with a quote, not here."""
    from ringfence.admission.proofs import snp, snp_chain, snp_revocation
    from ringfence.admission.proofs.kinds import hardware_rules

    roots = [line.root for line in snp_chain.pinned().values()]
    found_rules = [hardware_rules(rules) for rule in policy.rules for _, rules in rule.proofs]
    named = [rules for rules in found_rules if isinstance(rules, snp.Rules)]
    lists = dict.fromkeys(each for rules in named for each in rules.revoked)
    found = ((each.describe(), snp_revocation.objection(each, roots, now)) for each in lists)
    return [f"{name}: {text}" for name, text in found if text is not None]


def run_explain(options: argparse.Namespace) -> int:
    """Print what the policy means."""
    from ringfence.admission.policy_file.policy_file import explain
    from ringfence.config.settings import load_policy

    print("\n".join(map(layout_line, explain(load_policy(options.file)))))
    return 0
