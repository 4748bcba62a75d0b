"""Errors and warnings about the installed version of torch."""

from __future__ import annotations

import logging
import os
from unittest.mock import patch

import torch
import torch.distributed as dist

from ringfence.errors import ConfigurationError
from tests.pool import Pool


def start_on(version: str, local_rank: str) -> list[str]:
    """The warnings of a worker that creates three groups with this version of torch, or its error."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ringfence")
    log.addHandler(handler)
    with patch.object(torch, "__version__", version), patch.dict(os.environ, LOCAL_RANK=local_rank):
        try:
            dist.init_process_group("ringfence", store=dist.HashStore(), rank=0, world_size=1)
        except ConfigurationError as error:
            return [str(error)]
        dist.new_group()
        dist.new_group(backend="gloo")
        dist.destroy_process_group()
    log.removeHandler(handler)
    return said


CASES = [
    ("2.12.1", "0", ['needs torch 2.13 or newer; this is 2.12.1: python -m pip install "torch>=2.13,<2.16"']),
    ("2.13.0", "0", []),
    ("2.15.1+cu132", "0", []),
    ("2.16.0", "0", ["torch 2.16.0 is newer than the releases that ringfence is tested with (2.13 to 2.15)"]),
    ("2.16.0", "1", []),
]


def start_on_each() -> list[list[str]]:
    return [start_on(version, local_rank) for version, local_rank, _ in CASES]


def test_old_torch_is_refused_and_untested_torch_reported_once() -> None:
    with Pool() as fresh:
        (found,) = fresh.check(start_on_each, 1, backend=None)
    for (version, local_rank, expected), said in zip(CASES, found, strict=True):
        assert len(said) == len(expected), (version, local_rank, said)
        assert all(part in whole for part, whole in zip(expected, said, strict=True)), said
