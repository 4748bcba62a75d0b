"""The example of tensor-parallel generation gives the tokens of one process, on the CPU and on the simulated device."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import pytest
import torch

from tests import ports
from tests.integration.test_readme import MARKED, ROOT, completed, environment

GUIDE = (ROOT / "docs" / "guides" / "inference.md").read_text()
EXAMPLE = ROOT / "examples" / "generate_tensor_parallel.py"
TOKENS = 32


@pytest.fixture(scope="module")
def tokens_of_one_process() -> list[int]:
    """The tokens of the whole model, without a process group."""
    example = runpy.run_path(str(EXAMPLE))
    cpu = torch.device("cpu")
    tokens: list[int] = example["generate"](example["make_model"](cpu), cpu, TOKENS)
    assert len(tokens) == TOKENS and len(set(tokens)) > 10
    return tokens


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_two_workers_generate_the_tokens_of_one_process(
    tokens_of_one_process: list[int], device_library: Path, kind: str, tmp_path: Path
) -> None:
    variables = environment(tmp_path)
    if kind == "sim":
        variables["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (commands,) = MARKED.findall(GUIDE)
    script = commands.replace("29500", str(ports.port())).rstrip() + f" --device {kind}"
    done = completed(["bash", "-euo", "pipefail", "-c", script], tmp_path, variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 2 workers, run " in done.stderr
    (line,) = re.findall(r"^tokens (.*)$", done.stdout, re.MULTILINE)
    assert [int(token) for token in line.split()] == tokens_of_one_process
