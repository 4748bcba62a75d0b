"""The module `torch.sim`: what libraries ask of `torch.cuda` and its siblings."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch

Stream = torch.Stream
Event = torch.Event


def register(name: str) -> None:
    """Give the loaded device its name, and make this module `torch.<name>`."""
    torch.utils.rename_privateuse1_backend(name)
    torch._register_device_module(name, sys.modules[__name__])
    sys.modules[f"torch.{name}"] = sys.modules[__name__]
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


# -- devices --------------------------------------------------------------------------------------------------------


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(torch.accelerator.current_device_index() if index is None else index)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return bool(torch.ops.ringfence_sim.forked())


def device_count() -> int:
    return int(torch.ops.ringfence_sim.devices())


def current_device() -> int:
    return int(torch.accelerator.current_device_index())


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


def device(device: Any) -> Any:
    """Return a context manager that makes a device the current one."""
    return torch.accelerator.device_index(_index(device))


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


# -- streams --------------------------------------------------------------------------------------------------------


def stream(stream: Any) -> Any:
    """Return a context manager that makes a stream the current one; None changes nothing."""
    return contextlib.nullcontext() if stream is None else stream


def current_stream(device: Any = None) -> Any:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Any = None) -> Any:
    kind = torch._C._autograd.DeviceType.PrivateUse1.value
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=kind)


def set_stream(stream: Any) -> None:
    torch.accelerator.set_stream(stream)


def is_current_stream_capturing() -> bool:
    return bool(current_stream().is_capturing())


# -- random numbers -------------------------------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    torch.ops.ringfence_sim.seed(current_device(), _signed(seed))


def manual_seed_all(seed: int) -> None:
    if _is_in_bad_fork():
        return
    for index in range(device_count()):
        torch.ops.ringfence_sim.seed(index, _signed(seed))


def _signed(seed: int) -> int:
    """The same 64 bits as the operators take them."""
    return (int(seed) + 2**63) % 2**64 - 2**63


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.ops.ringfence_sim.random_state(_index(device))


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    torch.ops.ringfence_sim.set_random_state(_index(device), new_state)


# -- memory ---------------------------------------------------------------------------------------------------------


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def memory_allocated(device: Any = None) -> int:
    return int(torch.accelerator.memory_allocated(_index(device)))


def memory_reserved(device: Any = None) -> int:
    return int(torch.accelerator.memory_reserved(_index(device)))


def max_memory_allocated(device: Any = None) -> int:
    return int(torch.accelerator.max_memory_allocated(_index(device)))


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))
