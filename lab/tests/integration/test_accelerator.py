"""The simulated accelerator: work runs later and in order, missing waits are visible, and torch can train on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lab.tests.integration import accelerator_memory as memory
from lab.tests.integration import accelerator_order as order
from lab.tests.integration import accelerator_training as training
from tests.limits import HANG
from tests.pool import Pool

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a function in a process of its own that has the device."""
    with Pool() as pool:
        pool.check(order.names, world=1, backend=None, timeout=HANG)  # builds the device if needed
        yield lambda function, *args: pool.check(function, world=1, backend=None, args=args, timeout=HANG)[0]


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
    """The device's own clock measures it."""
    expected = {"down": 50, "up": 25, "both down": 100, "down and up": 50}
    assert run(memory.copy_times, 160e6) == pytest.approx(expected, abs=0.001)


def test_the_seed_determines_random_delays(run: Run) -> None:
    one, again, other = (run(order.jitter_time, seed) for seed in (38, 38, 5))  # 71 and 172 ms
    assert one == pytest.approx(again, abs=0.001)
    assert abs(one - other) > 50


def test_an_operator_that_the_cpu_computes_returns_before_its_result_is_written(run: Run) -> None:
    with Pool() as pool:  # of its own: the worker is left with a kernel that does not end
        pool.check(order.later_though_computed_by_the_cpu, world=1, backend=None)


@pytest.mark.parametrize("strategy", ["none", "DDP", "FSDP2", "DTensor"])
def test_training_has_the_losses_of_the_cpu(run: Run, strategy: str) -> None:
    expected, found = run(training.training, strategy)
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[-1] < found[0]
