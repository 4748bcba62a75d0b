"""What is logged of an outage. tests/integration/test_outages.py has real ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ringfence.transport import outage
from ringfence.transport.outage import _Announcements


def test_an_outage_is_logged_once_and_its_end_with_its_length(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(outage, "time", clock)
    said = _Announcements(300.0, lambda peer: f"worker {peer}")

    def after(seconds: float, silent: dict[int, float], unanswered: set[int]) -> list[str]:
        caplog.clear()
        clock.now = 1000.0 + seconds
        said.update(silent, unanswered)
        return caplog.messages

    assert after(0.0, {1: 0.1, 2: 40.0}, set()) == []  # an idle connection is silent, and owes nothing
    assert after(4.0, {1: 4.0, 2: 44.0}, {1}) == []
    told = "a machine or the network is down. Waiting for up to 300 s (RINGFENCE_OUTAGE_TIMEOUT)"
    assert after(6.0, {1: 6.0, 2: 46.0}, {1, 2}) == [f"no answer from worker 1, worker 2 for 46 s: {told}"]
    assert after(60.0, {1: 60.0, 2: 100.0}, {1, 2}) == []
    assert after(83.5, {1: 0.5, 2: 123.5}, {2}) == ["worker 1 answered again after 83 s"]
    assert after(90.0, {1: 0.1}, set()) == []  # the connection to worker 2 was closed
    assert after(96.0, {2: 6.0}, {2}) == [f"no answer from worker 2 for 6 s: {told}"]


def test_a_message_names_a_few_peers(caplog: pytest.LogCaptureFixture) -> None:
    said = _Announcements(300.0, str)
    said.update(dict.fromkeys(range(20), 7.0), set(range(20)))
    assert "from 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, ... for 7 s" in caplog.text
