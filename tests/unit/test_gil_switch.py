"""The interpreter's switch interval: short while requests are in progress, restored afterwards."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.runtime.gil_switch import GilSwitch, keep_timers_exact


@pytest.fixture(autouse=True)
def _interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_the_switch_interval_is_short_until_the_end() -> None:
    sys.setswitchinterval(0.005)
    gil_switch = GilSwitch()
    gil_switch.begin()
    gil_switch.begin()
    assert sys.getswitchinterval() == pytest.approx(50e-6)
    gil_switch.end()
    assert sys.getswitchinterval() == pytest.approx(0.005)
    gil_switch.end()
    assert sys.getswitchinterval() == pytest.approx(0.005)


@pytest.mark.parametrize("first", [0, 1])
def test_the_switch_interval_is_short_until_the_last_loop_ends(first: int) -> None:
    sys.setswitchinterval(0.005)
    loops = [GilSwitch(), GilSwitch()]
    for loop in loops:
        loop.begin()
    loops[first].end()
    assert sys.getswitchinterval() == pytest.approx(50e-6)
    loops[1 - first].end()
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_a_loop_that_has_ended_shortens_nothing() -> None:
    """A thread may wake it late; later loops would wait for it for ever."""
    sys.setswitchinterval(0.005)
    ended, other = GilSwitch(), GilSwitch()
    ended.begin()
    ended.close()
    assert sys.getswitchinterval() == pytest.approx(0.005)
    ended.begin()
    assert sys.getswitchinterval() == pytest.approx(0.005)
    other.begin()
    other.end()
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_a_shorter_interval_of_the_user_stays() -> None:
    sys.setswitchinterval(10e-6)
    gil_switch = GilSwitch()
    gil_switch.begin()
    assert sys.getswitchinterval() == pytest.approx(10e-6)
    gil_switch.end()
    assert sys.getswitchinterval() == pytest.approx(10e-6)


def test_an_interval_set_meanwhile_stays() -> None:
    sys.setswitchinterval(0.005)
    gil_switch = GilSwitch()
    gil_switch.begin()
    sys.setswitchinterval(0.001)
    gil_switch.end()
    assert sys.getswitchinterval() == pytest.approx(0.001)


def test_timer_slack_is_reduced_in_the_calling_thread_only() -> None:
    seen = []

    def ask() -> None:
        keep_timers_exact()
        seen.append(int(Path(f"/proc/{threading.get_native_id()}/timerslack_ns").read_text()))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert seen == [1000]
    assert int(Path(f"/proc/{threading.get_native_id()}/timerslack_ns").read_text()) != 1000
