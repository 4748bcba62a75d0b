"""`ringfence certificate new | renew | revoke FOLDER NAME ...`: a small certificate authority and its certificates."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from ringfence.cli.terminal import Commands, number, say
from ringfence.errors import ConfigurationError

DESCRIPTION = """\
Issue a certificate for each NAME. The first call also makes the certificate authority that issues them.

  FOLDER/ca.pem    the authority's certificate; every worker needs it, with the policy
  FOLDER/ca.key    the authority's key, which can issue certificates; keep it off the workers
  FOLDER/NAME.pem  a certificate for the identity spiffe://TRUST-DOMAIN/worker/NAME
  FOLDER/NAME.key  its private key, for that worker or machine only

Use this if you have no authority yet. Certificates from SPIRE, cert-manager, Vault or step-ca work too, and these services
renew them. No file is overwritten; call the command again with the same FOLDER to issue certificates for more names.
"""

EXAMPLES = """\
examples:
  ringfence certificate new site node-0 node-1
  ringfence certificate new site node-2 --days 7
  ringfence policy new site/policy.toml --admit certificate
"""

RENEW = """\
Issue the certificates of the NAMEs anew: same authority, same name, same key, new dates.

Copy FOLDER/NAME.pem to its machine, over the file there (write a new file and rename it). Nothing needs to be started
again: workers read it when a session begins, agents of `ringfence run` when they connect. A certificate that was revoked is
not renewed.
"""

RENEW_EXAMPLES = """\
examples:
  ringfence certificate renew site node-0 node-1
  ringfence certificate renew site node-0 --days 7
"""

REVOKE = """\
Add the certificates of the NAMEs to the authority's list of revoked certificates, FOLDER/ca.crl, and sign it anew.

Copy the list to every machine, to where `crl` in its policy points: the next session refuses these workers. Without a NAME, the
list has the same entries and a new date. Make a new list before this one expires (--days), or becomes older than the policy
allows (`crl_max_age`).
"""

REVOKE_EXAMPLES = """\
examples:
  ringfence certificate revoke site node-1
  ringfence certificate revoke site               renew the list
"""

TRUST_DOMAIN = "ringfence.internal"
DAYS = number(1, 825)
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,62}")


def add_to(commands: Commands) -> None:
    """Add the actions of `certificate` to the command line."""
    certificate = commands.add_parser("certificate", help="issue certificates for workers")
    actions = certificate.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, what, description, examples, run_it, days, named in (
        ("new", "issue certificates; makes an authority if there is none", DESCRIPTION, EXAMPLES, run, 30, "+"),
        ("renew", "issue certificates anew, with new dates", RENEW, RENEW_EXAMPLES, run_renew, 30, "+"),
        ("revoke", "revoke certificates; writes the list of revoked ones", REVOKE, REVOKE_EXAMPLES, run_revoke, 7, "*"),
    ):
        action = actions.add_parser(name, help=what, description=description, epilog=examples)
        action.add_argument(
            "folder", type=Path, metavar="FOLDER", help="the folder of the authority and its certificates"
        )
        action.add_argument("names", nargs=named, metavar="NAME", help="a worker or machine: letters, digits, - and _")
        if name == "new":
            trust_domain = f"trust domain of a new authority (default: {TRUST_DOMAIN})"
            action.add_argument("--trust-domain", metavar="NAME", help=trust_domain)
        lifetime = f"for how many days it is valid (default: {days})"
        action.add_argument("--days", type=DAYS, default=days, metavar="N", help=lifetime)
        action.add_argument("--json", action="store_true", help="print the result as JSON")
        action.set_defaults(run=run_it)


def run(options: argparse.Namespace) -> int:
    """Write the files and print how to use them."""
    from ringfence.cli.dev_ca import Authority  # imported here, so that `doctor` starts without cryptography

    names = _names(options)
    authority = Authority.open_or_make(options.folder, options.trust_domain, TRUST_DOMAIN)
    made = authority.issue(names, options.days)
    if options.json:
        found = {"ca": str(authority.file.absolute()), "trust_domain": authority.trust_domain, "certificates": made}
        print(json.dumps(found))
        return 0
    for each in made:
        say(f"Wrote a certificate for {each['id']}, valid for {options.days} days, and its key:")
        print(f"  {each['certificate']}\n  {each['key']}")
    folder = options.folder.absolute()
    print("\nThe certificate of the authority:")
    print(f"  {folder / 'ca.pem'}")
    say("Its key issues certificates. Do not copy it to workers:")
    print(f"  {folder / 'ca.key'}")
    print("\nCopy ca.pem and the policy to every machine:")
    print(f"  ringfence policy new {options.folder / 'policy.toml'} --admit certificate")
    print(f"  export RINGFENCE_POLICY={folder / 'policy.toml'}")
    print("Copy to each machine its own .pem and .key, such as:")
    print(f"  export RINGFENCE_CERTIFICATE_FILE={made[0]['certificate']}")
    print(f"  export RINGFENCE_KEY_FILE={made[0]['key']}")
    return 0


def run_renew(options: argparse.Namespace) -> int:
    """Replace the certificates and print what to do with them."""
    from ringfence.cli.dev_ca import Authority

    made = Authority.open(options.folder).renew(_names(options), options.days)
    if options.json:
        print(json.dumps({"certificates": made}))
        return 0
    for each in made:
        say(f"Renewed the certificate of {each['id']}, valid for {options.days} days:")
        print(f"  {each['certificate']}")
    say("Copy each to its machine, over the file there. Its key stays the same, and nothing needs to be started again.")
    return 0


def run_revoke(options: argparse.Namespace) -> int:
    """Write the list and print what to do with it."""
    from ringfence.cli.dev_ca import Authority

    path, serials = Authority.open(options.folder).revoke(_names(options), options.days)
    if options.json:
        print(json.dumps({"file": str(path.absolute()), "serials": [f"{each:x}" for each in serials]}))
        return 0
    say(f"Wrote {path}: {len(serials)} revoked certificate{'s' * (len(serials) != 1)}, valid for {options.days} days.")
    say("Copy it to every machine. A policy names it in [admit.certificate]:")
    print(f'  crl = "ca.crl"\n  crl_max_age = "{options.days}d"')
    return 0


def _names(options: argparse.Namespace) -> list[str]:
    names = list(dict.fromkeys(options.names))
    for name in names:
        if not _NAME.fullmatch(name) or name == "ca":
            raise ConfigurationError(f"{name!a} cannot name a worker: use letters, digits, - and _, and not 'ca'")
    return names
