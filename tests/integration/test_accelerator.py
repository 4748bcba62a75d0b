"""The simulated accelerator: work runs later and in order, missing waits are visible, and torch can train on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration import accelerator_memory as memory
from tests.integration import accelerator_order as order
from tests.integration import accelerator_training as training
from tests.pool import Pool

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a function in a process of its own that has the device."""
    with Pool() as pool:
        pool.check(order.names, world=1, backend=None, timeout=280)  # builds the device if needed
        yield lambda function, *args: pool.check(function, world=1, backend=None, args=args, timeout=60)[0]


@pytest.mark.parametrize("jitter", [0.0, 0.003], ids=["steady", "random delays"])
@pytest.mark.parametrize("name", order.ORDER)
def test_a_missing_wait_gives_a_wrong_number(run: Run, name: str, jitter: float) -> None:
    right, wrong = run(order.ordering, name, jitter)
    assert right == 7
    assert wrong != 7


@pytest.mark.parametrize(
    "scenario",
    [
        order.names,
        order.later,
        order.timing,
        order.many_tasks,
        order.capture,
        memory.reuse,
        memory.no_growth,
        memory.returned,
        memory.resized,
        memory.pinned,
        memory.pageable,
        memory.confidential,
        memory.counted,
        memory.conversions,
        memory.generators,
        training.future,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_the_device_behaves_as_a_gpu(run: Run, scenario: Callable[[], None]) -> None:
    run(scenario)


def test_each_direction_has_one_copy_engine_with_a_rate(run: Run) -> None:
    """The device's own clock measures it; a machine that others use can only make it slower."""
    trials = [run(memory.copy_times, 160e6) for _ in range(4)]  # 50 ms for 8 MB down, 25 ms up
    times = {name: min(trial[name] for trial in trials) for name in trials[0]}
    assert 49 < times["down"] < 80
    assert 24 < times["up"] < 45
    assert times["both down"] > 1.7 * times["down"]
    assert times["down and up"] < 1.4 * times["down"]


def test_the_seed_determines_random_delays(run: Run) -> None:
    one, again, other = (run(order.jitter_time, seed) for seed in (38, 38, 5))  # 71 and 172 ms
    assert abs(one - again) < abs(one - other) / 2


@pytest.mark.parametrize("strategy", ["none", "DDP", "FSDP2", "DTensor"])
def test_training_has_the_losses_of_the_cpu(run: Run, strategy: str) -> None:
    expected, found = run(training.training, strategy)
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[-1] < found[0]
