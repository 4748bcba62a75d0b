"""torchrun's dynamic rendezvous unpickles what anybody may write: a worker that finds itself under it says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ringfence.settings import new_secret_file
from tests.process.test_readme import environment, free_port

SCRIPT = """
import torch.distributed as dist
dist.init_process_group("ringfence")
dist.barrier()
dist.destroy_process_group()
"""
WARNING = "dynamic rendezvous (c10d, etcd, --standalone) authenticates nobody"


def started_by(torchrun: list[str], variables: dict[str, str], folder: Path) -> str:
    """What torchrun and its two workers write."""
    (folder / "script.py").write_text(SCRIPT)
    new_secret_file(folder / "secret")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *torchrun, "script.py"]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment(folder), "RINGFENCE_SECRET_FILE": str(folder / "secret"), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "ringfence: 2 workers" in done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("torchrun", "variables"),
    [
        (["--standalone"], {}),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"], {}),
        (["--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0"], {}),
        ([], {"PET_STANDALONE": "1"}),
        ([], {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "127.0.0.1:0"}),
    ],
    ids=["--standalone", "--rdzv-backend c10d", "--rdzv_backend=c10d", "PET_STANDALONE", "PET_RDZV_BACKEND"],
)
def test_every_worker_under_a_dynamic_rendezvous_warns(
    torchrun: list[str], variables: dict[str, str], tmp_path: Path
) -> None:
    assert started_by(torchrun, variables, tmp_path).count(WARNING) == 2


def test_a_static_rendezvous_is_not_warned_of(tmp_path: Path) -> None:
    static = ["--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    assert WARNING not in started_by(static, {"PET_STANDALONE": "0", "PET_RDZV_BACKEND": "static"}, tmp_path)
