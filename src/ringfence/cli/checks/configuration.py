"""Checks of the configuration that a worker started from this environment would find."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ringfence.cli.checks.check import Check
from ringfence.cli.checks.software import install_missing
from ringfence.errors import EvidenceError, RingfenceError
from ringfence.release import PAGES

if TYPE_CHECKING:
    from ringfence.config.settings import Settings

AS_IT_SAYS: Final = f"change the environment as `settings` says; every variable: {PAGES}/reference/settings.html"


def checks(environ: Mapping[str, str]) -> list[Check]:
    """Return all checks of the configuration."""
    return [settings(environ), admission(environ)]


def settings(environ: Mapping[str, str]) -> Check:
    """Check that a worker started from here would accept its settings and find free ports, by the calls that it makes."""
    name = "settings"
    try:
        from ringfence.admission.entry import format_address
        from ringfence.config.settings import Settings
        from ringfence.session.join.listener import listen

        found = Settings.without_credentials(environ)
        with listen(found) as listener, listen(found):  # one for links, one for admission if it has children
            address = found.link_address(listener.getsockname()[:2])
    except ImportError as error:
        return Check(name, f"unknown: {error}", None, False, install_missing(error))
    except RingfenceError as error:
        return Check(name, str(error), None, False, AS_IT_SAYS)
    where = format_address(address) if found.ports or found.advertise else f"any port of {found.host}"
    return Check(name, f"run {found.run_id}, generation {found.generation}, {where}", found.run_id, True)


def admission(environ: Mapping[str, str]) -> Check:
    """Check that a worker started from here has the credentials that its policy requires; without a policy, the secret."""
    path = environ.get("RINGFENCE_POLICY")
    if path is None:
        return _by_secret(environ)
    try:
        from ringfence.evidence import token_command
        from ringfence.session.join.provers import policy_of

        found = _credentials(environ)
        if found.token_command:
            token_command.check(found.token_command)
        policy, prover = policy_of(found)
    except ImportError as error:
        return Check("policy", f"unknown: {error}", None, False, install_missing(error))
    except EvidenceError as error:
        return Check("policy", str(error), None, False, "set RINGFENCE_TOKEN_COMMAND to a command that can be run")
    except RingfenceError as error:
        return Check("policy", str(error), None, False, _fix(path, environ))
    inside = _inside_machine(policy.inside_machine)
    if not inside.good:
        return inside
    shown = next(each.name for each in policy.verifiers if each.kind == prover.kind)
    digest = policy.digest[:8].hex()
    return Check("policy", f"{path} (digest {digest}): this worker presents {shown}{inside.text}", digest, True)


def _fix(path: str, environ: Mapping[str, str]) -> str:
    if not path:
        return "set RINGFENCE_POLICY to the policy file, or unset it"
    check = f"ringfence policy check {path}"
    file = environ.get("RINGFENCE_CERTIFICATE_FILE")
    return check if not file else f"if {file} is at fault, get one of the policy's authority; otherwise: {check}"


def _inside_machine(backends: Sequence[str]) -> Check:
    """Check that groups inside this machine can be proved, if the policy permits any."""
    from ringfence.runtime.same_machine import obstacle

    names = ", ".join(backends)
    reason = obstacle() if backends else ""
    if reason:
        text = f"inside_machine permits {names}, but a worker here cannot prove which machine it is on: {reason}"
        return Check(
            "policy", text, None, False, "change that, or remove inside_machine from the policy of every worker"
        )
    return Check("policy", f"; groups inside one machine may use {names} unsealed" if names else "", None, True)


def _by_secret(environ: Mapping[str, str]) -> Check:
    """Check the secret, and that there is no other credential: without a policy, a worker refuses those."""
    found = secret_file(environ)
    if not found.good:
        return found
    try:
        _credentials(environ)
    except RingfenceError as error:
        return Check(
            "credentials",
            str(error),
            None,
            False,
            "set RINGFENCE_POLICY, or unset these credentials",
        )
    return found


def _credentials(environ: Mapping[str, str]) -> Settings:
    """Return the credentials only, so that a mistake in other settings is reported once."""
    from ringfence.config.settings import CREDENTIALS, Settings

    return Settings.from_environment({name: environ[name] for name in CREDENTIALS if name in environ})


def secret_file(environ: Mapping[str, str]) -> Check:
    """Check that a worker started from here would find a usable secret."""
    name = "secret"
    path = environ.get("RINGFENCE_SECRET_FILE", "")
    if not path:
        make = "ringfence secret new run.secret && export RINGFENCE_SECRET_FILE=$PWD/run.secret"
        return Check(name, "RINGFENCE_SECRET_FILE is not set", None, False, make)
    quoted = shlex.quote(path)
    elsewhere = "set RINGFENCE_SECRET_FILE to the secret file itself"
    copy = f"copy the run's secret to {quoted}, or make a new one for all workers:"
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return Check(name, f"{path} is not a regular file", None, False, elsewhere)
        open(path, "rb").close()
    except FileNotFoundError as error:
        return Check(name, f"{path}: {error.strerror}", None, False, f"{copy} ringfence secret new {quoted}")
    except PermissionError as error:  # not by a new secret, which the other workers would refuse
        fix = f"let the user who starts workers own it: chown {os.geteuid()} {quoted} && chmod 600 {quoted}"
        return Check(name, f"{path}: {error.strerror}", None, False, fix)
    except OSError as error:
        return Check(name, f"{path}: {error.strerror}", None, False, elsewhere)
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        return Check(name, f"{path} has mode {mode:04o}: others can read it", None, False, f"chmod 600 {quoted}")
    try:
        from ringfence.config.private_files import load_secret

        load_secret(Path(path))
    except ImportError as error:
        return Check(name, f"unknown: {error}", None, False, install_missing(error))
    except RingfenceError as error:
        aside = f"mv {quoted} {quoted}.old && ringfence secret new {quoted}"  # a secret is never overwritten
        return Check(name, str(error), None, False, f"{copy} {aside}")
    return Check(name, f"{path} (mode {mode:04o})", path, True)
