"""`ringfence certificate new FOLDER NAME ...`: a small authority of one's own, and certificates for workers."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.errors import ConfigurationError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

DESCRIPTION = """\
Make certificates for workers, one for each NAME, and at the first time an authority that issues them.

  FOLDER/ca.pem    the authority; goes with the policy to every worker
  FOLDER/ca.key    its key: whoever has it can make certificates, so it goes nowhere
  FOLDER/NAME.pem  a certificate for the identity spiffe://TRUST-DOMAIN/worker/NAME
  FOLDER/NAME.key  its key, for that worker or machine alone

For those who have no authority yet. Certificates of SPIRE, cert-manager, Vault or step-ca work as well, and are
renewed without you. Nothing that exists is overwritten; the same FOLDER with new names issues more certificates.
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
    certificate = commands.add_parser("certificate", help="make an authority and certificates for workers")
    actions = certificate.add_subparsers(title="actions", metavar="ACTION", required=True)
    new = actions.add_parser(
        "new",
        help="make certificates, and the authority that issues them if there is none",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    new.add_argument("folder", type=Path, metavar="FOLDER", help="where they are, or will be")
    new.add_argument("names", nargs="+", metavar="NAME", help="a worker or a machine: letters, digits, - and _")
    new.add_argument(
        "--trust-domain",
        metavar="NAME",
        help=f"of a new authority (default: {TRUST_DOMAIN}); later the folder knows it",
    )
    new.add_argument("--days", type=int, default=30, metavar="N", help="until the certificates expire (default: 30)")
    new.add_argument("--json", action="store_true", help="print the result as JSON")
    new.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Make the files and say how to use them."""
    from ringfence.cli.dev_ca import Authority  # late, so that `doctor` starts where cryptography is missing

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
        print(f"Wrote {each['certificate']} and its key, for {each['id']}, {options.days} days.")
    folder = options.folder.absolute()
    print(f"\nThe authority is {folder / 'ca.pem'}. Keep {folder / 'ca.key'} away from workers: it makes certificates.")
    print("Give each machine its own .pem and .key, and every machine the policy and ca.pem:")
    print(f"  ringfence policy new {options.folder / 'policy.toml'} --admit certificate")
    print(f"  export RINGFENCE_POLICY={folder / 'policy.toml'}")
    print(f"  export RINGFENCE_CERTIFICATE_FILE={made[0]['certificate']} RINGFENCE_KEY_FILE={made[0]['key']}")
    return 0
