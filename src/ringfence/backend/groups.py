"""`init`, for frameworks that choose a backend themselves, and `assert_sealed`, which finds groups that bypass ringfence."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from ringfence.errors import ConfigurationError

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init(timeout: timedelta | None = None) -> None:
    """Create the default process group with backend "ringfence", from the environment that torchrun sets.

    Call it before a framework creates a group: Accelerate, Hugging Face's Trainer, DeepSpeed and torchtitan use the default
    group if there is one. If it exists and is ringfence's, this does nothing.

    Args:
        timeout: The group's timeout; torch's default is half an hour. Timeouts that are set in a framework do not apply
            to a group that exists.

    Raises:
        ConfigurationError: The default group is another backend's, or the variables that torchrun sets are missing.
    """
    import torch.distributed as dist

    from ringfence.backend import autoload

    if dist.is_initialized():
        _check(dist.group.WORLD, "the default process group", "call ringfence.init() before the code that created it")
        return
    missing = [name for name in _ENVIRONMENT if name not in os.environ]
    if missing:
        raise ConfigurationError(f"{', '.join(missing)} must be set: start the script with torchrun")
    autoload.register()  # if TORCH_DEVICE_BACKEND_AUTOLOAD=0 prevented it, or the script has made settings
    dist.init_process_group("ringfence", timeout=timeout)


def assert_sealed() -> None:
    """Check that every process group of this process is ringfence's. Call it after the framework has set up its groups.

    A group inside one machine that the policy permits (`inside_machine`) passes: its members have proved where they are.

    It checks the groups that torch lists: those of `init_process_group`, `new_group` and meshes. ``RINGFENCE_REQUIRE=1``
    also refuses groups that are created later or directly.

    Raises:
        ConfigurationError: There is no process group, or one is another backend's; the message names it.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ConfigurationError("there is no process group, so nothing is sealed")
    _check(dist.group.WORLD, "the default process group", "call ringfence.init() before the code that created it")
    for group in dist.distributed_c10d._world.pg_map:
        _check(group, f"the process group {group.group_name}", "RINGFENCE_REQUIRE=1 names the call that created it")


def check_group_sealed(group: Any) -> None:
    """Raise ConfigurationError if a process group is another backend's, and not permitted inside this machine."""
    _check(
        group,
        "the process group",
        "pass a group of backend ringfence, or call ringfence.init() before others create one",
    )


def _check(group: Any, what: str, advice: str) -> None:
    import torch.distributed as dist

    from ringfence.backend.inside import is_inside
    from ringfence.backend.process_group import RingfenceProcessGroup

    if not isinstance(group, RingfenceProcessGroup) and not is_inside(group):
        raise ConfigurationError(
            f"{what} is of backend {dist.get_backend(group)}: its traffic is not protected; {advice}"
        )
