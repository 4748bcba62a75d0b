"""Which dtypes a tensor may be loaded into: numbers are rounded, and never become other ones or infinite."""

from __future__ import annotations

import torch

from ringfence.errors import CheckpointError


def check(name: str, stored: torch.dtype, target: torch.dtype) -> None:
    """Refuse a target dtype that cannot hold what a tensor may have. Raises CheckpointError, naming the tensor.

    A float of fewer bits is not refused, as training needs it: see `overflowed`. Those of 8 bits are, because without a scale
    PyTorch clamps what they cannot hold, or drops its sign.
    """
    if stored is target:
        return
    if not torch.can_cast(stored, target):
        raise CheckpointError(f"{name} is of {stored} in the checkpoint, which does not convert to {target}")
    if _is_inexact(target):
        is_refused = target.itemsize == 1
    elif torch.bool in (stored, target):
        is_refused = False  # from bool: to bool nothing else converts
    else:
        found, wanted = torch.iinfo(stored), torch.iinfo(target)
        is_refused = wanted.min > found.min or wanted.max < found.max
    if is_refused:
        raise CheckpointError(
            f"{name} is of {stored} in the checkpoint, and {target} cannot hold all numbers of that: load it into a tensor of "
            f"{stored}, and convert that one"
        )


def overflowed(loaded: torch.Tensor, target: torch.Tensor) -> bool:
    """Return whether a number became infinite, or none, when `loaded` was copied to `target`."""
    if loaded.dtype is target.dtype or _largest(loaded.dtype) <= _largest(target.dtype):
        return False
    lost = ~target.isfinite()
    if not lost.any():
        return False
    exact = loaded.float() if _is_inexact(loaded.dtype) and loaded.dtype.itemsize == 1 else loaded
    return bool((lost.to(exact.device) & exact.isfinite()).any())


def overflow_error(names: set[str]) -> CheckpointError:
    """Return the error for tensors that `overflowed`."""
    listed = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return CheckpointError(
        f"{listed}: the checkpoint has numbers that are too large for the dtype in the state, and would become infinite there: "
        "load into a wider dtype"
    )


def _is_inexact(dtype: torch.dtype) -> bool:
    return bool(dtype.is_floating_point or dtype.is_complex)


def _largest(dtype: torch.dtype) -> float:
    if dtype is torch.bool:
        return 1.0
    return float((torch.finfo if _is_inexact(dtype) else torch.iinfo)(dtype).max)
