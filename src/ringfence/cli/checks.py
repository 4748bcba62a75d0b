"""What `ringfence doctor` looks at: each check reads one thing of this machine and says what would repair it.

Packages are imported inside the checks, because a package that is missing or broken is what a check is there to find.
"""

from __future__ import annotations

import contextlib
import operator
import os
import platform
import re
import resource
import shlex
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ringfence import torch_versions
from ringfence.errors import EvidenceError, RingfenceError

if TYPE_CHECKING:
    from ringfence.settings import Settings

SMALL_BYTES: Final = 4 * 1024  # measured beside the largest segment
MEASURED_SECONDS: Final = 0.15  # for each size
CPU_FLAGS: Final = ("aes", "vaes", "vpclmulqdq")  # what AES-256-GCM is fast with
AS_IT_SAYS: Final = "change the environment as `settings` says; docs/reference/settings.md has every variable"
TEES: Final = {"tdx": ("Intel TDX", "dev/tdx_guest"), "snp": ("AMD SEV-SNP", "dev/sev-guest")}
TSM: Final = "sys/kernel/config/tsm/report"

Value = str | int | bool | list[str] | dict[str, float] | None


@dataclass(frozen=True)
class Check:
    """One finding. `good` is None for a fact that is neither good nor bad; `fix` says what to run or change."""

    name: str
    text: str
    value: Value
    good: bool | None = None
    fix: str = ""


def software(environ: Mapping[str, str]) -> list[Check]:
    """What a group needs before it can be formed, in the order in which a person would repair it."""
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


def hardware(root: Path) -> list[Check]:
    """What this machine is. `root` is / but in tests."""
    return [cores(), cpu_flags(root), throughput(), tee(root), core_dumps(root)]


def configuration(environ: Mapping[str, str]) -> list[Check]:
    """What a worker that is started from here would be told."""
    return [settings(environ), admission(environ)]


# -- software -------------------------------------------------------------------------------------------------------


def python() -> Check:
    wanted = metadata.metadata("ringfence")["Requires-Python"]
    version = platform.python_version()
    good = within(version, wanted)
    return Check("python", version, version, good, "" if good else f"install Python {wanted}")


def package(name: str) -> Check:
    """Whether a package is there, in a version that ringfence's own metadata asks for."""
    wanted, fix = requirement(name), install(name)
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, f"missing; {wanted} is needed", None, False, fix)
    good = within(version, wanted)
    return Check(name, version if good else f"{version}, but {wanted} is needed", version, good, "" if good else fix)


def install(name: str) -> str:
    """The command that brings a package in a version that ringfence's own metadata asks for."""
    return f'python -m pip install "{name}{requirement(name)}"'


def _install_missing(error: ImportError) -> str:
    """For what a check could not import: what is not pyOpenSSL is cryptography, or imported by it."""
    return install("pyOpenSSL" if (error.name or "").partition(".")[0] == "OpenSSL" else "cryptography")


def torch() -> Check:
    """A torch that is newer than the tested ones may work, so it is no fault; `group` finds out whether it does."""
    found = package("torch")
    if found.good and torch_versions.untested(str(found.value)):
        text = f"{found.text} (newer than the releases that ringfence is tested with: {torch_versions.TESTED})"
        return replace(found, text=text)
    return found if found.good else replace(found, fix=torch_versions.INSTALL)


def requirement(name: str) -> str:
    """The versions of a package that ringfence asks for, such as ">=50,<51"."""
    for line in metadata.requires("ringfence") or ():
        match = re.match(r"([\w.-]+)([^;]*)", line)
        if match and match[1].lower() == name.lower():
            return match[2].strip()
    raise LookupError(f"ringfence does not depend on {name}")


def within(version: str, wanted: str) -> bool:
    """Whether a version lies in a range of the plain kind that this project uses: ">=2.13" or ">=50,<51"."""
    compare = {">=": operator.ge, "<": operator.lt}
    for bound in wanted.split(","):
        match = re.fullmatch(r"\s*(>=|<)\s*([\d.]+)\s*", bound)
        if match is None:
            raise ValueError(f"not a range of versions: {wanted!r}")
        if not compare[match[1]](_numbers(version), _numbers(match[2])):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu is (2, 13), as trailing zeros mean nothing."""
    release = re.match(r"[\d.]+", version)
    numbers = [int(part) for part in release[0].strip(".").split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def openssl() -> Check:
    try:
        from cryptography.hazmat.backends.openssl import backend as library
    except ImportError as error:
        return Check("openssl", f"unknown: cryptography cannot be imported ({error})", None)
    text = library.openssl_version_text()
    return Check("openssl", f"{text} (inside cryptography)", text)


def key_agreement(environ: Mapping[str, str]) -> Check:
    """How workers on this machine would agree on keys: by a TLS connection in memory, under what the policy asks for."""
    name = "key agreement"
    try:
        from ringfence import keys
        from ringfence.settings import load_policy
        from ringfence.transport.tls import agreed_here

        wanted, path = keys.KEY_AGREEMENTS[0], environ.get("RINGFENCE_POLICY")
        if path:
            with contextlib.suppress(RingfenceError):  # `policy` says what is wrong with it
                wanted = load_policy(path).key_agreement
        agreed = agreed_here(hybrid=wanted == keys.KEY_AGREEMENTS[0])
    except ImportError as error:
        return Check(name, f"unknown: {error}", None, False, _install_missing(error))
    except RingfenceError as error:
        return Check(name, str(error), None, False, install("cryptography"))
    if agreed in keys.HYBRID_GROUPS:
        return Check(name, f"{agreed} (hybrid, post-quantum)", agreed, True)
    return Check(name, f"{agreed}, which is not post-quantum; the policy permits it", agreed)


def backend(environ: Mapping[str, str]) -> Check:
    """Whether importing torch makes the name "ringfence" known, which is all that a training script relies on."""
    name = "backend"
    if found := switched_off(environ):
        return found
    try:
        from torch import distributed
    except ImportError as error:
        return Check(name, f"not registered: torch cannot be imported ({error})", False, False, torch_versions.INSTALL)
    except RuntimeError as error:  # what torch raises when a plug-in fails, whichever it is
        reason = str(error).partition("\n")[0]
        fix = "python -c 'import torch' shows which plug-in fails: repair or uninstall it"
        return Check(name, f"not registered: importing torch fails ({reason})", False, False, fix)
    if not distributed.is_available() or "ringfence" not in distributed.Backend.backend_list:
        fix = "in a clone of ringfence: python -m pip install --force-reinstall --no-deps ."
        return Check(name, 'not registered: "import torch" did not find the entry point', False, False, fix)
    return Check(name, 'registered: backend="ringfence" works without an import', True, True)


def switched_off(environ: Mapping[str, str]) -> Check | None:
    """The variable of torch's, if any, that keeps the backend from a worker."""
    name = "backend"
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        text = "not registered: TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns torch's plug-ins off"
        return Check(name, text, False, False, "unset TORCH_DEVICE_BACKEND_AUTOLOAD")
    if environ.get("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "0") not in ("", "0"):
        text = "refused: TORCH_DISTRIBUTED_USE_TORCHCOMMS bypasses process groups, and ringfence"
        return Check(name, text, False, False, "unset TORCH_DISTRIBUTED_USE_TORCHCOMMS")
    return None


def data_plane() -> Check:
    """Which one moves the bytes. The one in Python does the same, slower, and nothing else would tell."""
    name = "data plane"
    try:
        from ringfence.dataplane import info, native
    except RingfenceError as error:
        return Check(name, str(error), None, False, "unset RINGFENCE_DATAPLANE, or install ringfence again")
    except (ImportError, RuntimeError) as error:  # RuntimeError is what torch raises when a plug-in of it fails
        return Check(name, f"unknown: torch or cryptography cannot be imported ({error})", None)
    if native.COMPILED:
        return Check(name, "compiled", "compiled", True)
    return Check(name, f"not compiled: {info.why_not()}", "python")


# -- hardware -------------------------------------------------------------------------------------------------------


def cores() -> Check:
    count = len(os.sched_getaffinity(0))
    return Check("cores", f"{count} usable by this process", count)


def cpu_flags(root: Path) -> Check:
    """The instructions that make sealing cheap. Without them it is as safe, and slower."""
    flags = read_cpu_flags(root)
    present = [flag for flag in CPU_FLAGS if flag in flags]
    text = " ".join(present) if present else "none of " + ", ".join(CPU_FLAGS)
    if "aes" not in flags:
        text += ": sealing will be slow on this CPU"
    return Check("cpu flags", text, list(present))


def read_cpu_flags(root: Path) -> frozenset[str]:
    """The first CPU's flags; "Features" is what Arm calls them."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def throughput() -> Check:
    """How fast one core seals, measured now with the very call that the data path uses."""
    try:
        from ringfence.keys import SEGMENT_BYTES

        sizes = (SMALL_BYTES, SEGMENT_BYTES)
        rates = {str(size): round(sealing_rate(size), 2) for size in sizes}
    except ImportError as error:
        return Check("AES-256-GCM", f"not measured: cryptography cannot be imported ({error})", None)
    text = ", ".join(f"{rates[str(size)]:.1f} GB/s in {size // 1024} KiB segments" for size in sizes)
    return Check("AES-256-GCM", f"{text} (one core)", rates)


def sealing_rate(size: int, seconds: float = MEASURED_SECONDS, clock: Callable[[], float] = time.perf_counter) -> float:
    """Gigabytes per second of AES-256-GCM on one core: the best of many short rounds, as others share the machine."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    aead = AESGCM(AESGCM.generate_key(256))
    plain, sealed = bytearray(size), bytearray(size + 16)
    calls = max(1, (1 << 20) // size)
    counter, best = 0, 0.0
    end = clock() + seconds
    while True:
        start = clock()
        for _ in range(calls):
            counter += 1
            aead.encrypt_into(counter.to_bytes(12, "big"), plain, None, sealed)
        now = clock()
        if now > start:
            best = max(best, calls * size / (now - start) / 1e9)
        if now >= end and best:
            return best


def tee(root: Path) -> Check:
    """Which trusted execution environment this machine is a guest of, and whether the kernel attests to it."""
    for kind, (name, device) in TEES.items():
        if not (root / device).exists():
            continue
        if (root / TSM).is_dir():
            return Check("TEE", f"guest of {name}, and the kernel attests to it (/{TSM})", kind, True)
        text = f"guest of {name} (/{device}), but /{TSM} is not there: no evidence can be collected"
        fix = "use Linux 6.7 or later, and: mount -t configfs none /sys/kernel/config"
        return Check("TEE", text, kind, None, fix)
    return Check("TEE", "none found: policies that ask for tdx or snp cannot be met here", None)


def core_dumps(root: Path) -> Check:
    """A dump is a worker's memory. Whether a machine makes one is its owner's to decide, so this is a note."""
    limit = resource.getrlimit(resource.RLIMIT_CORE)[0]
    try:
        pattern = (root / "proc/sys/kernel/core_pattern").read_text().strip()
    except OSError:
        pattern = ""
    if pattern.startswith("|"):  # core(5): what reads from a pipe is started whatever the limit is
        text = f"a program gets them, whatever the limit: {pattern.split()[0]} (sysctl kernel.core_pattern)"
    elif limit:
        size = "unlimited" if limit == resource.RLIM_INFINITY else f"up to {limit} bytes"
        text = f"on ({size}); `ulimit -c 0` switches them off"
    else:
        return Check("core dumps", "off", limit)
    return Check("core dumps", f"{text}: a worker that crashes leaves its keys in one", limit)


# -- configuration --------------------------------------------------------------------------------------------------


def settings(environ: Mapping[str, str]) -> Check:
    """Whether a worker started from here would take its settings and find its ports, by the very calls that it makes."""
    name = "settings"
    try:
        from ringfence.admission.entry import format_address
        from ringfence.join.listener import listen
        from ringfence.settings import Settings

        found = Settings.without_credentials(environ)
        with listen(found) as listener, listen(found):  # for links; for admission, if it has children
            address = found.link_address(listener.getsockname()[:2])
    except ImportError as error:
        return Check(name, f"unknown: {error}", None, False, _install_missing(error))
    except RingfenceError as error:
        return Check(name, str(error), None, False, AS_IT_SAYS)
    where = format_address(address) if found.ports or found.advertise else f"any port of {found.host}"
    return Check(name, f"run {found.run_id}, generation {found.generation}, {where}", found.run_id, True)


def admission(environ: Mapping[str, str]) -> Check:
    """Whether a worker started from here has what its policy asks for; without a policy, the secret."""
    path = environ.get("RINGFENCE_POLICY")
    if path is None:
        return _by_secret(environ)
    try:
        from ringfence.evidence import token_command
        from ringfence.join.provers import policy_of

        found = _credentials(environ)
        if found.token_command:
            token_command.check(found.token_command)
        policy, prover = policy_of(found)
    except ImportError as error:
        return Check("policy", f"unknown: {error}", None, False, _install_missing(error))
    except EvidenceError as error:
        return Check("policy", str(error), None, False, "name a command that can be run in RINGFENCE_TOKEN_COMMAND")
    except RingfenceError as error:
        fix = f"ringfence policy check {path}" if path else "unset RINGFENCE_POLICY, or name the policy file in it"
        return Check("policy", str(error), None, False, fix)
    shown = next(each.name for each in policy.verifiers if each.kind == prover.kind)
    digest = policy.digest[:8].hex()
    return Check("policy", f"{path} (digest {digest}): this worker shows {shown}", digest, True)


def _by_secret(environ: Mapping[str, str]) -> Check:
    """The secret; and no other credential, which without a policy a worker refuses."""
    found = secret_file(environ)
    if not found.good:
        return found
    try:
        _credentials(environ)
    except RingfenceError as error:
        return Check("credentials", str(error), None, False, "set RINGFENCE_POLICY, or unset what it would ask for")
    return found


def _credentials(environ: Mapping[str, str]) -> Settings:
    """Without what `settings` looks at, so that one mistake is one finding."""
    from ringfence.settings import CREDENTIALS, Settings

    return Settings.from_environment({name: environ[name] for name in CREDENTIALS if name in environ})


def secret_file(environ: Mapping[str, str]) -> Check:
    """Whether a worker started from here would find a usable secret."""
    name = "secret"
    path = environ.get("RINGFENCE_SECRET_FILE", "")
    if not path:
        make = "ringfence secret new run.secret && export RINGFENCE_SECRET_FILE=$PWD/run.secret"
        return Check(name, "RINGFENCE_SECRET_FILE is not set", None, False, make)
    quoted = shlex.quote(path)
    elsewhere = "name the secret file itself in RINGFENCE_SECRET_FILE"
    copy = f"copy the run's secret to {quoted}, or make a new one for all workers:"
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return Check(name, f"{path} is not a regular file", None, False, elsewhere)
        open(path, "rb").close()
    except FileNotFoundError as error:
        return Check(name, f"{path}: {error.strerror}", None, False, f"{copy} ringfence secret new {quoted}")
    except PermissionError as error:  # a new secret would be one that the other workers refuse
        fix = f"let the user who starts workers own it: chown {os.geteuid()} {quoted} && chmod 600 {quoted}"
        return Check(name, f"{path}: {error.strerror}", None, False, fix)
    except OSError as error:
        return Check(name, f"{path}: {error.strerror}", None, False, elsewhere)
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        return Check(name, f"{path} has mode {mode:04o}: others can read it", None, False, f"chmod 600 {quoted}")
    try:
        from ringfence.private_files import load_secret

        load_secret(Path(path))
    except ImportError as error:
        return Check(name, f"unknown: {error}", None, False, _install_missing(error))
    except RingfenceError as error:
        aside = f"mv {quoted} {quoted}.old && ringfence secret new {quoted}"  # what exists is never overwritten
        return Check(name, str(error), None, False, f"{copy} {aside}")
    return Check(name, f"{path} (mode {mode:04o})", path, True)


def bad(checks: Iterable[Check]) -> list[Check]:
    """Those that stand in the way of a run."""
    return [check for check in checks if check.good is False]
