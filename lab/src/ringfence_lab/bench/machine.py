"""Facts about this machine and this installation that a reader of the samples needs to verify them."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
from collections.abc import Collection, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import ringfence
import ringfence_lab
from ringfence.config.cores import cpu_fact
from ringfence.dataplane import info

_PACKAGES = ("ringfence", "torch", "cryptography", "pyOpenSSL", "transformers")
_FEATURES = {"aes", "vaes", "pclmulqdq", "vpclmulqdq", "avx2", "avx512f"}  # that seal and add
_CODE = (".py", ".c", ".h", ".cpp", ".so")  # what is compiled counts too


def facts() -> dict[str, Any]:
    """Return the CPU, caches, kernel and versions."""
    return {
        "cpu": cpu_fact("model name") or platform.machine(),
        "features": " ".join(sorted(_FEATURES & set(cpu_fact("flags").split()))),
        "cores": len(os.sched_getaffinity(0)),
        "caches": _caches(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "openssl": _openssl(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "source": source_digest(),
        **(
            {} if info.wanted() == "compiled" else {"data_plane": "python"}
        ),  # its samples never stand beside compiled ones
    }


def now() -> str:
    """Return the date and time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def digest(facts: Mapping[str, Any]) -> str:
    """Return the digest of the facts of a machine and its code."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def source_digest(without: Collection[str] = ()) -> str:
    """Return the digest of the measured code: samples of different code are never combined.

    `without` are folders that take no part in what is measured, with the name of their package: `ringfence/cli`.
    """
    state = hashlib.sha256()
    for package in (Path(ringfence.__file__).parent, Path(ringfence_lab.__file__).parent):
        top = package.parent
        files = (file.relative_to(top) for file in package.rglob("*") if file.suffix in _CODE)
        for file in sorted(file for file in files if not any(file.is_relative_to(left_out) for left_out in without)):
            state.update(str(file).encode() + b"\0" + (top / file).read_bytes() + b"\0")
    return state.hexdigest()[:12]


def _caches() -> dict[str, str]:
    """The first core's: {"L1 Data": "48K", "L2 Unified": "2048K", …}."""
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        found[f"L{level} {kind}"] = size
    return found


def _openssl() -> str:
    from cryptography.hazmat.backends.openssl import backend

    return str(backend.openssl_version_text())


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
