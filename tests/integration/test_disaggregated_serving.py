"""The example with prefill and decode on different workers gives the tokens of one process, and refuses other caches."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ringfence as ringfence_package
from ringfence.config.private_files import new_secret_file
from ringfence.errors import MismatchError
from tests.cli.command import ringfence
from tests.integration.test_readme import ROOT
from tests.pool import Failure, Pool
from tests.progress_thread import between_steps

EXAMPLE = ROOT / "examples" / "disaggregated_serving.py"
WORLD = 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def answers_of_one_process() -> list[list[int]]:
    """What the model answers without a cache: every token from all those before it."""
    example = runpy.run_path(str(EXAMPLE))
    model, answers = example["Decoder"](), []
    nothing = torch.empty(2, example["HEADS"], 0, example["SIZE"])
    with torch.inference_mode():
        for prompt in example["PROMPTS"]:
            tokens = list(prompt)
            for _ in range(example["NEW"]):
                caches = [nothing] * example["LAYERS"]
                tokens += model(torch.tensor(tokens), caches, lambda cache: None).tolist()
            answers.append(tokens[len(prompt) :])
    assert len({tuple(answer) for answer in answers}) == len(answers) and all(len(set(each)) > 8 for each in answers)
    return answers


def served() -> tuple[list[list[int]], dict[int, int]]:
    """The answers, and the bytes that this worker sealed for each other one until they were there."""
    example = runpy.run_path(str(EXAMPLE))
    dist.barrier()  # opens the group
    before = between_steps(ringfence_package.counters)
    with torch.inference_mode():
        answers = example["serve"](example["PROMPTS"], CPU).tolist()
    known = {peer.worker: peer.sealed_sent for peer in before.peers}
    after = between_steps(ringfence_package.counters)
    return answers, {peer.worker: peer.sealed_sent - known.get(peer.worker, 0) for peer in after.peers}


def test_two_pairs_of_workers_give_the_tokens_of_one_process(
    pool: Pool, answers_of_one_process: list[list[int]]
) -> None:
    """Each prompt's cache leaves the worker that computed it once, sealed."""
    results = pool.check(served, WORLD, renew=True)
    assert results[0][0] == answers_of_one_process
    prompts = [len(prompt) for prompt in runpy.run_path(str(EXAMPLE))["PROMPTS"]]
    for rank in range(2):
        mine = prompts[rank::2]
        caches = sum(mine) * 4 * 2 * 4 * 16 * 4  # layers, keys and values, heads, their size, bytes
        assert results[rank][1][rank + 2] == caches + len(mine) * (5 * 8 + 8)  # a header and a token for each


def offer() -> list[str] | None:
    """Worker 0 sends caches that do not fit; return what worker 1 says of each."""
    example = runpy.run_path(str(EXAMPLE))
    if dist.get_rank() == 0:
        for header in ([4, 2, 8, 12, 8], [4, 2, 4, 10**12, 16], [4, 2, 4, 0, 16], [3, 2, 4, 12, 16]):
            dist.send(torch.tensor(header), 1)
        return None
    errors = []
    for _ in range(4):
        with pytest.raises(ValueError, match="does not fit this model") as raised:
            example["receive"](0, CPU)
        errors.append(str(raised.value))
    return errors


def test_another_shape_is_refused_before_a_cache_is_received(pool: Pool) -> None:
    """The first has as many elements as the right one, so only the header tells them apart."""
    errors = pool.check(offer, 2, renew=True)[1]
    assert [re.findall(r"\[.*\]", error)[0] for error in errors] == [
        "[4, 2, 8, 12, 8]",
        f"[4, 2, 4, {10**12}, 16]",
        "[4, 2, 4, 0, 16]",
        "[3, 2, 4, 12, 16]",
    ]


def mislead(dtype: torch.dtype, positions: int) -> None:
    """Worker 0 announces a cache of 12 positions and sends another one."""
    if dist.get_rank() == 0:
        dist.send(torch.tensor([4, 2, 4, 12, 16]), 1)
        dist.send(torch.zeros(2, 4, positions, 16, dtype=dtype), 1)
        dist.barrier()
    else:
        runpy.run_path(str(EXAMPLE))["receive"](0, CPU)


@pytest.mark.parametrize(("dtype", "positions"), [(torch.bfloat16, 12), (torch.int32, 12), (torch.float32, 11)])
def test_another_dtype_or_length_than_announced_ends_the_run(pool: Pool, dtype: torch.dtype, positions: int) -> None:
    sender, receiver = pool.run(mislead, 2, args=(dtype, positions), renew=True)
    assert isinstance(receiver, Failure) and receiver.type == MismatchError.__name__
    assert "Both ends must name the same tag, dtype and element count" in receiver.message
    assert isinstance(sender, Failure) and "MismatchError" in sender.message


@pytest.mark.parametrize("kind", ["cpu", pytest.param("sim", marks=pytest.mark.nightly)])
def test_the_command_of_the_example(
    answers_of_one_process: list[list[int]], request: pytest.FixtureRequest, kind: str, tmp_path: Path
) -> None:
    if kind == "sim":
        request.getfixturevalue("device_library")
    new_secret_file(tmp_path / "run.secret")
    words = ("run", "--nproc-per-node", str(WORLD), str(EXAMPLE), "--device", kind)
    done = ringfence(*words, folder=tmp_path, RINGFENCE_SECRET_FILE="run.secret")
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^request (\d): (.*)$", done.stdout, re.MULTILINE)
    assert [[int(token) for token in answer.split()] for _, answer in found] == answers_of_one_process
