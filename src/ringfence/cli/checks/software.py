"""Checks of the software that a group needs.

Packages are imported inside the checks, because a check has to report a package that is missing or broken.
"""

from __future__ import annotations

import contextlib
import operator
import platform
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata

from ringfence.backend import torch_versions
from ringfence.cli.checks.check import Check
from ringfence.errors import RingfenceError


def checks(environ: Mapping[str, str]) -> list[Check]:
    """Return all checks of the software, in the order in which faults are best repaired."""
    return [
        python(),
        torch(),
        package("cryptography"),
        package("pyOpenSSL"),
        openssl(),
        key_agreement(environ),
        backend(environ),
        data_plane(),
    ]


def python() -> Check:
    """Check the version of Python against ringfence's metadata."""
    wanted = metadata.metadata("ringfence")["Requires-Python"]
    version = platform.python_version()
    good = within(version, wanted)
    return Check("python", version, version, good, "" if good else f"install Python {wanted}")


def package(name: str) -> Check:
    """Check that a package is installed, in a version that ringfence's metadata allows."""
    wanted, fix = requirement(name), install(name)
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, f"missing; {wanted} is needed", None, False, fix)
    good = within(version, wanted)
    return Check(name, version if good else f"{version}, but {wanted} is needed", version, good, "" if good else fix)


def install(name: str) -> str:
    """Return the command that installs a package in a version that ringfence's metadata allows."""
    return f'python -m pip install "{name}{requirement(name)}"'


def install_missing(error: ImportError) -> str:
    """Return the command that installs what a check could not import: pyOpenSSL, else cryptography."""
    return install("pyOpenSSL" if (error.name or "").partition(".")[0] == "OpenSSL" else "cryptography")


def torch() -> Check:
    """Check the version of torch. A release newer than the tested ones is not a fault; the check `group` tries it."""
    found = package("torch")
    if found.good and torch_versions.untested(str(found.value)):
        text = f"{found.text} (newer than the releases that ringfence is tested with: {torch_versions.TESTED})"
        return replace(found, text=text)
    return found if found.good else replace(found, fix=torch_versions.INSTALL)


def requirement(name: str) -> str:
    """Return the versions of a package that ringfence requires, such as ">=50,<51". Raises LookupError for others."""
    for line in metadata.requires("ringfence") or ():
        match = re.match(r"([\w.-]+)([^;]*)", line)
        if match and match[1].lower() == name.lower():
            return match[2].strip()
    raise LookupError(f"ringfence does not depend on {name}")


def within(version: str, wanted: str) -> bool:
    """Return whether a version lies in a range such as ">=2.13" or ">=50,<51". Raises ValueError for other forms."""
    compare = {">=": operator.ge, "<": operator.lt}
    for bound in wanted.split(","):
        match = re.fullmatch(r"\s*(>=|<)\s*([\d.]+)\s*", bound)
        if match is None:
            raise ValueError(f"not a range of versions: {wanted!r}")
        if not compare[match[1]](_numbers(version), _numbers(match[2])):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version without trailing zeros: (2, 13) for 2.13.0+cpu."""
    release = re.match(r"[\d.]+", version)
    numbers = [int(part) for part in release[0].strip(".").split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def openssl() -> Check:
    """Report the version of OpenSSL that cryptography contains."""
    try:
        from cryptography.hazmat.backends.openssl import backend as library
    except ImportError as error:
        return Check("openssl", f"unknown: cryptography cannot be imported ({error})", None)
    text = library.openssl_version_text()
    return Check("openssl", f"{text} (inside cryptography)", text)


def key_agreement(environ: Mapping[str, str]) -> Check:
    """Check the key agreement of workers on this machine, by a TLS connection in memory under the policy's setting."""
    name = "key agreement"
    try:
        from ringfence import keys
        from ringfence.config.settings import load_policy
        from ringfence.transport.tls import agreed_here

        wanted, path = keys.KEY_AGREEMENTS[0], environ.get("RINGFENCE_POLICY")
        if path:
            with contextlib.suppress(RingfenceError):  # the check `policy` reports it
                wanted = load_policy(path).key_agreement
        agreed = agreed_here(hybrid=wanted == keys.KEY_AGREEMENTS[0])
    except ImportError as error:
        return Check(name, f"unknown: {error}", None, False, install_missing(error))
    except RingfenceError as error:
        return Check(name, str(error), None, False, install("cryptography"))
    if agreed in keys.HYBRID_GROUPS:
        return Check(name, f"{agreed} (hybrid, post-quantum)", agreed, True)
    return Check(name, f"{agreed}, not post-quantum, which the policy permits", agreed)


def backend(environ: Mapping[str, str]) -> Check:
    """Check that importing torch registers the backend "ringfence", which training scripts rely on."""
    name = "backend"
    if found := switched_off(environ):
        return found
    try:
        from torch import distributed
    except ImportError as error:
        return Check(name, f"not registered: torch cannot be imported ({error})", False, False, torch_versions.INSTALL)
    except RuntimeError as error:  # raised by torch when any plug-in fails
        reason = str(error).partition("\n")[0]
        fix = "repair or uninstall the plug-in that fails, shown by: python -c 'import torch'"
        return Check(name, f"not registered: importing torch fails ({reason})", False, False, fix)
    if not distributed.is_available() or "ringfence" not in distributed.Backend.backend_list:
        fix = "in a clone of ringfence, run: python -m pip install --force-reinstall --no-deps ."
        return Check(name, 'not registered: "import torch" did not find the entry point', False, False, fix)
    return Check(name, 'registered: backend="ringfence" works without an import', True, True)


def switched_off(environ: Mapping[str, str]) -> Check | None:
    """Return a finding if an environment variable of torch keeps workers from using the backend, else None."""
    name = "backend"
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        text = "not registered: TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns torch's plug-ins off"
        return Check(name, text, False, False, "unset TORCH_DEVICE_BACKEND_AUTOLOAD")
    if environ.get("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "0") not in ("", "0"):
        text = "refused: TORCH_DISTRIBUTED_USE_TORCHCOMMS bypasses process groups, and ringfence"
        return Check(name, text, False, False, "unset TORCH_DISTRIBUTED_USE_TORCHCOMMS")
    return None


def data_plane() -> Check:
    """Report which data plane runs. The one in Python works the same but is slower."""
    name = "data plane"
    try:
        from ringfence.dataplane import info, native
    except RingfenceError as error:
        return Check(name, str(error), None, False, "install ringfence again, or unset RINGFENCE_DATAPLANE")
    except (ImportError, RuntimeError) as error:  # torch raises RuntimeError if a plug-in fails
        return Check(name, f"unknown: torch or cryptography cannot be imported ({error})", None)
    if native.COMPILED:
        return Check(name, "compiled", "compiled", True)
    return Check(name, f"not compiled: {info.SLOWER}", "python")
