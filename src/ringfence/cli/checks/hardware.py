"""Checks of the machine: its cores, how fast one seals, whether it is a confidential VM, and core dumps."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ringfence.cli.checks.check import Check
from ringfence.config.cores import cpu_fact, usable_cores

SMALL_BYTES: Final = 4 * 1024  # measured beside the largest segment
MEASURED_SECONDS: Final = 0.15  # for each size
CPU_FLAGS: Final = ("aes", "vaes", "vpclmulqdq")  # instructions that make AES-256-GCM fast
TEES: Final = {"tdx": ("Intel TDX", "dev/tdx_guest"), "snp": ("AMD SEV-SNP", "dev/sev-guest")}
TPM: Final = "dev/tpmrm0"
TSM: Final = "sys/kernel/config/tsm/report"


def checks(root: Path) -> list[Check]:
    """Return all checks of the machine. `root` is the root of the file system; tests pass a folder."""
    return [cores(root), cpu_flags(root), throughput(), tee(root), core_dumps(root)]


def cores(root: Path) -> Check:
    """Report the number of usable cores."""
    count = usable_cores(root)
    return Check("cores", f"{count} usable by this process", count)


def cpu_flags(root: Path) -> Check:
    """Report the instructions that make sealing fast. Without them it is as secure, but slower."""
    flags = cpu_fact("flags", "features", root=root).split()  # of x86, of Arm
    present = [flag for flag in CPU_FLAGS if flag in flags]
    text = " ".join(present) if present else "none of " + ", ".join(CPU_FLAGS)
    if "aes" not in flags:
        text += ": sealing will be slow on this CPU"
    return Check("cpu flags", text, list(present))


def throughput() -> Check:
    """Measure how fast one core seals, with the call that the data plane uses."""
    try:
        from ringfence.keys import SEGMENT_BYTES

        sizes = (SMALL_BYTES, SEGMENT_BYTES)
        rates = {str(size): round(sealing_rate(size), 2) for size in sizes}
    except ImportError as error:
        return Check("AES-256-GCM", f"not measured: cryptography cannot be imported ({error})", None)
    text = ", ".join(f"{rates[str(size)]:.1f} GB/s in {size // 1024} KiB segments" for size in sizes)
    return Check("AES-256-GCM", f"{text} (one core)", rates)


def sealing_rate(size: int, seconds: float = MEASURED_SECONDS, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return gigabytes per second of AES-256-GCM on one core: the best of many short rounds, as others share the machine."""
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
    """Report the trusted execution environment of this machine, and whether the kernel provides evidence of it."""
    for kind, (name, device) in TEES.items():
        if not (root / device).exists():
            continue
        if (root / TSM).is_dir():
            return Check("TEE", f"{name} guest; the kernel provides evidence (/{TSM})", kind, True)
        text = f"{name} guest (/{device}), but no evidence can be collected: /{TSM} is missing"
        fix = "use Linux 6.7 or later, and: mount -t configfs none /sys/kernel/config"
        return Check("TEE", text, kind, None, fix)
    if (root / TPM).exists():
        text = f"none found by the kernel, but a TPM (/{TPM}): on Azure it can meet a policy that requires azure_snp or"
        return Check("TEE", f"{text} azure_tdx; `ringfence evidence collect` tells", None)
    return Check("TEE", "none found: this machine cannot meet a policy that requires tdx or snp", None)


def core_dumps(root: Path) -> Check:
    """Report whether core dumps are on. A dump contains a worker's keys; the owner decides, so it is not a fault."""
    limit = resource.getrlimit(resource.RLIMIT_CORE)[0]
    try:
        pattern = (root / "proc/sys/kernel/core_pattern").read_text().strip()
    except OSError:
        pattern = ""
    if pattern.startswith("|"):  # core(5): a pipe ignores the limit
        text = f"sent to {pattern.split()[0]} whatever the limit (sysctl kernel.core_pattern)"
    elif limit:
        size = "unlimited" if limit == resource.RLIM_INFINITY else f"up to {limit} bytes"
        text = f"on ({size}); `ulimit -c 0` turns them off"
    else:
        return Check("core dumps", "off", limit)
    return Check("core dumps", f"{text}: the dump of a worker that crashes contains its keys", limit)
