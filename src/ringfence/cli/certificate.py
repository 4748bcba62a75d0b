"""`ringfence certificate new FOLDER NAME ...`: a small certificate authority, and certificates for workers."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.cli.terminal import say
from ringfence.errors import ConfigurationError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

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

TRUST_DOMAIN = "ringfence.internal"
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,62}")


def add_to(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `certificate new` to the command line."""
    certificate = commands.add_parser("certificate", help="issue certificates for workers")
    actions = certificate.add_subparsers(title="actions", metavar="ACTION", required=True)
    new = actions.add_parser(
        "new",
        help="issue certificates; makes an authority if there is none",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    new.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of the authority and its certificates")
    new.add_argument("names", nargs="+", metavar="NAME", help="a worker or machine: letters, digits, - and _")
    new.add_argument(
        "--trust-domain",
        metavar="NAME",
        help=f"trust domain of a new authority (default: {TRUST_DOMAIN})",
    )
    new.add_argument("--days", type=int, default=30, metavar="N", help="lifetime of the certificates (default: 30)")
    new.add_argument("--json", action="store_true", help="print the result as JSON")
    new.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the files and print how to use them."""
    from ringfence.cli.dev_ca import Authority  # imported here, so that `doctor` starts without cryptography

    names = list(dict.fromkeys(options.names))
    for name in names:
        if not _NAME.fullmatch(name) or name == "ca":
            raise ConfigurationError(f"{name!a} cannot name a worker: use letters, digits, - and _, and not 'ca'")
    if not 1 <= options.days <= 825:
        raise ConfigurationError("--days must be 1 to 825")
    authority = Authority.open_or_make(options.folder, options.trust_domain, TRUST_DOMAIN)
    made = authority.issue(names, options.days)
    if options.json:
        print(
            json.dumps(
                {"ca": str(authority.file.absolute()), "trust_domain": authority.trust_domain, "certificates": made}
            )
        )
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
