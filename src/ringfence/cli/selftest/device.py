"""The device that is tested, in a worker: choose it, keep it busy, and describe it."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, cast

import torch

from ringfence import __version__
from ringfence.cli.further_commands import INSTALL_LAB
from ringfence.config.cores import cpu_fact
from ringfence.dataplane import native
from ringfence.errors import ConfigurationError

SIMULATED: Final = "sim"
KERNEL_SECONDS: Final = 0.05
_MATRIX: Final = 1024
_MOST_LAUNCHES: Final = 2000

LongKernel = Callable[[float], None]


@dataclass(frozen=True)
class Setting:
    """What a check gets: the device of this worker, its place in the group, and how much time there is."""

    device: torch.device
    rank: int
    size: int
    quick: bool
    busy: LongKernel  # launches a kernel of so many seconds on the current stream


def open_device(wanted: str, rank: int) -> torch.device:
    """Make a device of the wanted type ("", "cuda", "cuda:1") the current one and return it.

    Without an index, workers share the devices evenly. Raises ConfigurationError, which says what to do.
    """
    kind, _, index = wanted.partition(":")
    if kind == SIMULATED:
        _simulated().load()
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        raise ConfigurationError(_none_found())
    if kind not in ("", found.type):
        raise ConfigurationError(
            f"the accelerator of this machine is {found.type}, not {kind}: use --device {found.type}"
        )
    count = torch.accelerator.device_count()
    if index and not (index.isdecimal() and int(index) < count):
        raise ConfigurationError(f"{wanted} does not exist: the devices are {found.type}:0 to {found.type}:{count - 1}")
    chosen = torch.device(found.type, int(index) if index else rank % count)
    torch.accelerator.set_device_index(chosen.index)
    return chosen


def _none_found() -> str:
    built = torch.version.cuda or torch.version.hip
    if built:
        return (
            f"torch finds no GPU, though it is built for {'CUDA' if torch.version.cuda else 'ROCm'} {built}: "
            "check the driver (`nvidia-smi` or `rocm-smi`) and CUDA_VISIBLE_DEVICES, "
            "or try the self-test on a simulated device with --device sim"
        )
    return (
        f"torch {torch.__version__} is built without support for an accelerator: install a build for yours "
        "(pytorch.org), or try the self-test on a simulated device with --device sim"
    )


def _simulated() -> Any:
    """Return the simulated device, which the lab brings as an entry point."""
    found = next(iter(metadata.entry_points(group="ringfence.devices", name=SIMULATED)), None)
    if found is None:
        raise ConfigurationError(
            f"the simulated device is part of the lab, which is not installed, and needs g++. {INSTALL_LAB}"
        )
    return found.load()


# -- long kernels ----------------------------------------------------------------------------------------------------


def long_kernel(device: torch.device) -> LongKernel:
    """Return a function that launches a kernel of a given duration on the current stream."""
    if device.type == SIMULATED:
        return cast(LongKernel, _simulated().sleep)
    if device.type == "cuda":
        per_second = 1e6 / _seconds_of(lambda: torch.cuda._sleep(1_000_000), 10)
        return lambda seconds: torch.cuda._sleep(math.ceil(seconds * per_second))
    matrix = torch.rand(_MATRIX, _MATRIX, device=device)
    product = torch.empty_like(matrix)
    each = _seconds_of(lambda: torch.mm(matrix, matrix, out=product), 20)

    def multiply(seconds: float) -> None:
        for _ in range(min(_MOST_LAUNCHES, math.ceil(seconds / each))):
            torch.mm(matrix, matrix, out=product)

    return multiply


def _seconds_of(launch: Callable[[], Any], count: int) -> float:
    """Return the time of one launch, after a first one that may compile or load the kernel."""
    launch()
    torch.accelerator.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        launch()
    torch.accelerator.synchronize()
    return max(1e-7, (time.perf_counter() - began) / count)


def measured_kernel(busy: LongKernel) -> float:
    """Return how long a kernel of KERNEL_SECONDS really takes."""
    return _seconds_of(lambda: busy(KERNEL_SECONDS), 1)


# -- description -----------------------------------------------------------------------------------------------------


def describe(device: torch.device) -> dict[str, str]:
    """Return what a report needs to know of this machine: no names of hosts or users, and no addresses."""
    version = torch.version
    built = f"CUDA {version.cuda}" if version.cuda else f"ROCm {version.hip}" if version.hip else "no GPU runtime"
    return {
        "device": f"{device.type}, {_name_of(device)}",
        "devices": str(torch.accelerator.device_count()),
        "driver": _driver(device),
        "torch": f"{torch.__version__} ({built})",
        "ringfence": f"{__version__}, data plane {'compiled' if native.COMPILED else 'in Python'}",
        "cryptography": metadata.version("cryptography"),
        "Python": platform.python_version(),
        "CPU": f"{cpu_fact('model name') or platform.machine()}, {len(os.sched_getaffinity(0))} cores usable",
        "Linux": f"{platform.release()}, {platform.machine()}",
    }


def _name_of(device: torch.device) -> str:
    if device.type == SIMULATED:
        return "simulated accelerator (not hardware)"
    module = torch.get_device_module(device)
    try:
        return str(module.get_device_name(device.index))
    except (AttributeError, RuntimeError):
        return "name unknown"


def _driver(device: torch.device) -> str:
    if device.type == SIMULATED:
        return "none"
    for path in ("/sys/module/nvidia/version", "/sys/module/amdgpu/version"):
        try:
            return Path(path).read_text().strip()
        except OSError:
            continue
    properties: Any = None
    with contextlib.suppress(AttributeError, RuntimeError):
        properties = torch.get_device_module(device).get_device_properties(device.index)
    return str(getattr(properties, "driver_version", "unknown"))
