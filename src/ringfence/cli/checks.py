"""What `ringfence doctor` looks at: each check reads one thing of this machine and says what would repair it.

Packages are imported inside the checks, because a package that is missing or broken is what a check is there to find.
"""

from __future__ import annotations

import operator
import os
import platform
import re
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Final

from ringfence.errors import RingfenceError

SIZES: Final = (4 * 1024, 512 * 1024)  # a small message; the largest segment
MEASURED_SECONDS: Final = 0.15  # for each size
CPU_FLAGS: Final = ("aes", "vaes", "vpclmulqdq")  # what AES-256-GCM is fast with
TESTED_TORCH: Final = "2.13"
INSTALL_TORCH: Final = f'python -m pip install "torch=={TESTED_TORCH}.*"'
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


def everything(environ: Mapping[str, str], root: Path) -> list[Check]:
    """All checks, in the order in which a person would repair them. `root` is / but in tests."""
    return [
        python(),
        torch(),
        package("cryptography"),
        package("pyOpenSSL"),
        openssl(),
        backend(environ),
        cores(),
        cpu_flags(root),
        throughput(),
        tee(root),
        admission(environ),
    ]


# -- software -------------------------------------------------------------------------------------------------------


def python() -> Check:
    wanted = metadata.metadata("ringfence")["Requires-Python"]
    version = platform.python_version()
    good = within(version, wanted)
    return Check("python", version, version, good, "" if good else f"install Python {wanted}")


def package(name: str) -> Check:
    """Whether a package is there, in a version that ringfence's own metadata asks for."""
    wanted = requirement(name)
    fix = f'python -m pip install "{name}{wanted}"'
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, f"missing; {wanted} is needed", None, False, fix)
    good = within(version, wanted)
    return Check(name, version if good else f"{version}, but {wanted} is needed", version, good, "" if good else fix)


def torch() -> Check:
    """A torch that is newer than the tested one may well work, so it is no fault; but people should know."""
    found = package("torch")
    if found.good and not str(found.value).startswith(f"{TESTED_TORCH}."):
        return replace(found, text=f"{found.text} (newer than {TESTED_TORCH}, which ringfence is tested on)")
    return found if found.good else replace(found, fix=INSTALL_TORCH)


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


def backend(environ: Mapping[str, str]) -> Check:
    """Whether importing torch makes the name "ringfence" known, which is all that a training script relies on."""
    name = "backend"
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        text = "not registered: TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns torch's plug-ins off"
        return Check(name, text, False, False, "unset TORCH_DEVICE_BACKEND_AUTOLOAD")
    try:
        from torch import distributed
    except ImportError as error:
        return Check(name, f"not registered: torch cannot be imported ({error})", False, False, INSTALL_TORCH)
    except RuntimeError as error:  # what torch raises when a plug-in fails, whichever it is
        reason = str(error).partition("\n")[0]
        fix = "python -c 'import torch' shows which plug-in fails: repair or uninstall it"
        return Check(name, f"not registered: importing torch fails ({reason})", False, False, fix)
    if not distributed.is_available() or "ringfence" not in distributed.Backend.backend_list:
        fix = "python -m pip install --force-reinstall --no-deps ringfence"
        return Check(name, 'not registered: "import torch" did not find the entry point', False, False, fix)
    return Check(name, 'registered: backend="ringfence" works without an import', True, True)


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
        rates = {str(size): round(sealing_rate(size), 2) for size in SIZES}
    except ImportError as error:
        return Check("AES-256-GCM", f"not measured: cryptography cannot be imported ({error})", None)
    text = ", ".join(f"{rates[str(size)]:.1f} GB/s in {size // 1024} KiB segments" for size in SIZES)
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


# -- configuration --------------------------------------------------------------------------------------------------


def admission(environ: Mapping[str, str]) -> Check:
    """Whether a worker started from here has what its policy asks for; without a policy, the secret."""
    path = environ.get("RINGFENCE_POLICY", "")
    if not path:
        return secret_file(environ)
    try:
        from ringfence.join.policy import policy_of
        from ringfence.settings import Settings

        policy, prover = policy_of(Settings.from_environment(environ))
    except (ImportError, RingfenceError) as error:
        return Check("policy", str(error), None, False, f"ringfence policy check {path}")
    shown = next(each.name for each in policy.verifiers if each.kind == prover.kind)
    digest = policy.digest[:8].hex()
    return Check("policy", f"{path} (digest {digest}): this worker shows {shown}", digest, True)


def secret_file(environ: Mapping[str, str]) -> Check:
    """Whether a worker started from here would find a usable secret."""
    name = "secret"
    path = environ.get("RINGFENCE_SECRET_FILE", "")
    make = "ringfence secret new run.secret && export RINGFENCE_SECRET_FILE=$PWD/run.secret"
    if not path:
        return Check(name, "RINGFENCE_SECRET_FILE is not set", None, False, make)
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError as error:
        return Check(name, f"{path}: {error.strerror}", None, False, make)
    if mode & 0o077:
        return Check(name, f"{path} has mode {mode:04o}: others can read it", None, False, f"chmod 600 {path}")
    try:
        from ringfence.settings import load_secret

        load_secret(Path(path))
    except (ImportError, RingfenceError) as error:
        return Check(name, str(error), None, False, make)
    return Check(name, f"{path} (mode {mode:04o})", path, True)


def bad(checks: Iterable[Check]) -> list[Check]:
    """Those that stand in the way of a run."""
    return [check for check in checks if check.good is False]
