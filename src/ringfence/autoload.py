"""What torch calls at the end of `import torch`: gives the backend its name. Imports nothing heavy and cannot raise."""

from __future__ import annotations

import logging
from typing import Any


def register() -> None:
    """Make ``init_process_group("ringfence")`` work in every script, without an import."""
    try:
        import torch.distributed as dist

        if dist.is_available() and not hasattr(dist.Backend, "RINGFENCE"):
            dist.Backend.register_backend("ringfence", _create, extended_api=True, devices=["cpu", "cuda"])
    except Exception:  # an exception here would break `import torch` itself, also for scripts that never use us
        logging.getLogger("ringfence").warning("the ringfence backend could not be registered", exc_info=True)


def _create(options: Any, backend_options: Any) -> Any:
    from ringfence.backend import create

    return create(options, backend_options)
