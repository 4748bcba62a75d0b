"""A worker warns if torchrun uses its c10d rendezvous, which unpickles unauthenticated data."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from ringfence.config.private_files import new_secret_file
from ringfence.session.rendezvous_warning import backend_of
from tests import ports
from tests.integration.test_readme import completed, environment

SCRIPT = """
import torch.distributed as dist
dist.init_process_group("ringfence")
dist.barrier()
dist.destroy_process_group()
"""
WARNING = "torchrun's c10d rendezvous has no authentication"


def started_by(torchrun: list[str], variables: dict[str, str], folder: Path) -> str:
    """The output of torchrun and its two workers."""
    (folder / "script.py").write_text(SCRIPT)
    new_secret_file(folder / "secret")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *torchrun, "script.py"]
    settings = {**environment(folder), "RINGFENCE_SECRET_FILE": str(folder / "secret"), **variables}
    done = completed(command, folder, settings)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ringfence: .* 2 workers, run ", done.stderr, re.M)
    return done.stderr


@pytest.mark.nightly  # the table below has it without a launcher
@pytest.mark.real_start  # a worker reads the command line of its launcher
def test_open_rendezvous_is_reported_on_every_worker(tmp_path: Path) -> None:
    """By torchrun's default, from the command line of the parent process; the table below has the other ways to it."""
    assert started_by([], {}, tmp_path).count(WARNING) == 2


@pytest.mark.nightly  # the table below has it without a launcher
@pytest.mark.real_start  # a worker reads the command line of its launcher
def test_static_rendezvous_is_not_reported(tmp_path: Path) -> None:
    static = ["--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(ports.port())]
    assert WARNING not in started_by(static, {"PET_STANDALONE": "0", "PET_RDZV_BACKEND": "static"}, tmp_path)


@pytest.mark.parametrize(
    ("command", "variables", "expected"),
    [
        ("python train.py", {}, None),
        ("python /usr/bin/torchrun --nproc-per-node 2 train.py", {}, "c10d"),
        ("torchrun --nproc-per-node 2 train.py --master-port 5", {}, "c10d"),  # the script's own argument
        ("torchrun --standalone train.py", {}, "c10d"),
        ("torchrun --rdzv_backend=c10d --rdzv_endpoint=a:1 train.py", {}, "c10d"),
        ("torchrun train.py", {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "a:1"}, "c10d"),
        ("torchrun --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 train.py", {}, "c10d"),
        ("torchrun --nproc-per-node 2 train.py", {"PET_STANDALONE": "1"}, "c10d"),
        ("python -m torch.distributed.run --master-port 29500 train.py", {}, "static"),
        ("python -u -m torch.distributed.run --nnodes 2 --node-rank 0 --master-addr a train.py", {}, "static"),
        ("torchrun train.py", {"PET_MASTER_PORT": "29500"}, "static"),
        ("torchrun --nnodes 1:4 --rdzv-backend etcd --rdzv-endpoint a:1 train.py", {}, "etcd"),
        ("torchrun --no-such-flag", {}, None),
    ],
)
def test_launcher_arguments_are_parsed_like_torchrun(
    command: str, variables: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert backend_of(command.split()) == expected
