"""Entry point that torch calls at the end of `import torch`: registers the backend.

A process without any setting of ringfence gets nothing else. One that has a setting is guarded from here on (guard.py), and a
worker of `ringfence run` gets its hooks (launch/worker.py); docs/reference/hooks.md lists both. Imports nothing heavy, and
raises only with ``RINGFENCE_REQUIRE``: then `import torch` fails rather than continue without the guard.
"""

from __future__ import annotations

import os
from typing import Any

from ringfence import guard
from ringfence.log import LOGGER


def register() -> None:
    """Make ``init_process_group("ringfence")`` work in every script, without an import.

    Raises:
        ConfigurationError: RINGFENCE_REQUIRE is set, and this torch cannot be guarded.
    """
    try:
        import torch.distributed as dist

        if dist.is_available():
            if not hasattr(dist.Backend, "RINGFENCE"):
                dist.Backend.register_backend("ringfence", _create, extended_api=True, devices=["cpu", "cuda"])
            taken = dist.Backend._plugins["RINGFENCE"].creator_fn is not _create  # by another plug-in
            if taken or any(name.startswith("RINGFENCE_") for name in os.environ):
                guard.install(_is_ours)
            if os.environ.get(guard.AGENT):
                from ringfence.launch import worker

                worker.install()
    except Exception:
        if os.environ.get(guard.REQUIRE, "0") != "0":
            raise  # `import torch` fails with it
        # an exception would break `import torch`, also for scripts that do not use ringfence
        LOGGER.warning("the ringfence backend could not be registered", exc_info=True)


def _create(options: Any, backend_options: Any) -> Any:
    from ringfence.backend.process_group import create

    return create(options, backend_options)


def _is_ours(group: Any) -> bool:
    from ringfence.backend.process_group import is_ours

    return is_ours(group)
