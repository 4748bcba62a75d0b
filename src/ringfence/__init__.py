"""ringfence: a torch.distributed backend for networks and clouds you do not trust.

Importing this does nothing and needs no torch: the backend registers itself through torch's own plug-in entry point
(`autoload.py`), so a training script says ``backend="ringfence"`` and imports nothing. Where a framework chooses the
backend, ``ringfence.init()`` makes the group first; ``ringfence.assert_sealed()`` checks that all groups are ringfence's.
"""

from importlib import import_module
from typing import Any

from ringfence.backend.groups import assert_sealed, init
from ringfence.errors import (
    AbortedError,
    AdmissionError,
    AuthenticationError,
    CheckpointError,
    CollectiveTimeoutError,
    ConfigurationError,
    MismatchError,
    PeerLostError,
    PolicyError,
    PrivateSumError,
    ProtocolError,
    RingfenceError,
    UnsupportedError,
)
from ringfence.release import RELEASE as __version__

__all__ = [
    "AbortedError",
    "AdmissionError",
    "AuthenticationError",
    "CheckpointError",
    "CollectiveTimeoutError",
    "ConfigurationError",
    "DiLoCo",
    "MismatchError",
    "PeerLostError",
    "PolicyError",
    "PrivateSumError",
    "ProtocolError",
    "RingfenceError",
    "UnsupportedError",
    "__version__",
    "assert_sealed",
    "checkpoint",
    "counters",
    "export_chrome_trace",
    "failure",
    "hooks",
    "init",
    "private_hook",
    "private_mean",
    "private_sum",
    "record_data",
    "rejoin",
    "round_ended",
    "workers",
]

_LAZY = {  # these need torch: imported when they are used
    "DiLoCo": "ringfence.diloco.averager",
    "counters": "ringfence.backend.observe",
    "export_chrome_trace": "ringfence.backend.trace",
    "failure": "ringfence.backend.observe",
    "private_hook": "ringfence.private_sums.updates",
    "private_mean": "ringfence.private_sums.updates",
    "private_sum": "ringfence.private_sums.summing",
    "record_data": "ringfence.backend.data_record",
    "rejoin": "ringfence.launch.rejoin",
    "round_ended": "ringfence.launch.rejoin",
    "workers": "ringfence.backend.observe",
}


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "hooks"):
        return import_module(f"ringfence.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'ringfence' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
