"""Calibration with simulated GPU TEEs: a known machine is found again, as is the published one."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from lab.tests.unit.plan_rows import tee_rows
from ringfence.errors import ConfigurationError
from ringfence_lab.accelerator import tee
from ringfence_lab.cli.plan import read_study
from ringfence_lab.plan import gpu_tee, hardware, models, published
from ringfence_lab.plan.hardware import dump, parse
from ringfence_lab.plan.steps import Question, step
from ringfence_lab.plan.work import VARIANTS

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "gpu-tee"


@pytest.mark.parametrize("preset", ["h100", "software"])
@pytest.mark.parametrize(("overhead", "rate"), [(330e-6, 4e9), (20e-6, 1e9), (2e-3, 11e9)])
def test_a_known_machine_is_found_again(preset: str, overhead: float, rate: float) -> None:
    settings = tee.load(preset).with_values(copy_overhead=overhead, cpu_rate=rate)
    stages = [rate, settings.link_rate, settings.device_rate, settings.authentication_rate]
    found = gpu_tee.calibrate(tee_rows(preset, copy_overhead=overhead, cpu_rate=rate), preset)
    assert found["device", "copy_overhead"] == pytest.approx(overhead, rel=0.02)
    assert 1 / found["device", "copy_rate"] == pytest.approx(sum(1 / each for each in stages if each), rel=0.02)
    assert found["device", "computing"] == 1
    assert found["device", "peer_rate"] == settings.peer_rate  # as in the preset


def test_what_the_model_does_not_cover_is_left_out() -> None:
    rows = tee_rows()
    changed = [{**row, "changed": "cpu_rate x2", "seconds": 1.0} for row in rows]
    copies = [{**row, "operation": "copy", "seconds": 1.0} for row in rows]
    both = gpu_tee.calibrate([*rows, *changed, *copies, *tee_rows("software")], "h100")
    assert both.values == gpu_tee.calibrate(rows, "h100").values
    with pytest.raises(ConfigurationError, match="at least 3 gpu-tee cells"):
        gpu_tee.calibrate(rows[:6], "h100")


def test_a_written_profile_keeps_the_sources_of_what_was_not_fitted() -> None:
    made = gpu_tee.calibrate(tee_rows(), "h100")
    again = parse(dump(made, "a study", "2026-11-16"), "tee")
    assert again.figures["device", "copy_rate"].origin == "a study (2026-11-16)"
    assert again.figures["device", "peer_overhead"] == made.figures["device", "peer_overhead"]
    assert again.figures["network", "rate"] == made.figures["network", "rate"]
    assert again.values == pytest.approx(made.values, rel=1e-5)


def test_devices_of_one_node_need_no_host_in_the_clear_and_nothing_else_in_confidential_mode() -> None:
    node = hardware.load("h100-cc-node")
    question = Question(models.load("gpt2"), 8, compute_seconds=1e-6)
    plain, hops = (step(node, VARIANTS[name], question) for name in ("plaintext", "hop-by-hop"))
    assert {term for term, seconds in plain.terms.items() if seconds} == {"compute", "wire"}
    assert {term for term, seconds in hops.terms.items() if seconds} == {"compute", "host-device copy"}
    apart = Question(models.load("gpt2"), 16, compute_seconds=1e-6)  # two nodes: through the network
    assert step(node, VARIANTS["hop-by-hop"], apart).terms["stack"] > 0


def test_computing_hides_copies_only_where_the_profile_says_so() -> None:
    question = Question(models.load("gpt2"), 4, compute_seconds=10.0)
    for computing, hidden in ((0, False), (1, True)):
        profile = hardware.load("h100-cc-node").with_values(device_computing=computing)
        found = step(profile, VARIANTS["hop-by-hop"], question)
        assert (found.exposed < found.communication.seconds / 2) is hidden


def test_ringfence_fills_its_slots_before_the_first_pass_is_executed() -> None:
    """A cell of ringfence in which the rate between hosts decides: eight passes are copied first, and the last one back."""
    size, workers, rate = 16 * (2 << 20), 2, 8e8
    row = {"variant": "ringfence", "operation": "all_reduce", "size": size, "workers": workers, "model": None}
    profile = hardware.load("h100-cc-node").with_values(device_copy_rate=4, device_copy_overhead=0)
    one = 2 * (2 << 20) / 4e9
    wire = size * 1514 / 1448 / (rate / 8)
    assert gpu_tee.predict(profile, {**row, "rate_bits": rate / 16, "dilation": 16}) == pytest.approx(
        8 * one + wire + one, rel=0.02
    )


def test_the_profile_and_the_simulated_figures_are_of_the_published_samples() -> None:
    rows = read_study(RESULTS)[0]
    made, shipped = gpu_tee.calibrate(rows, "h100"), hardware.load(published.NODE)
    for name in gpu_tee.CALIBRATED:
        assert shipped["device", name] == pytest.approx(made["device", name], rel=1e-3), name
        assert not shipped.figures["device", name].assumed
    cells = {
        (row["model"], row["bucket_mb"]): float(row["ratio"])
        for row in sorted(rows, key=lambda row: row["load"] or 0.0)  # of two dilations the smaller one
        if row["preset"] == "h100" and row["variant"] == "confidential" and row["model"] and not row["changed"]
        if row["workers"] == published.GPUS and row["samples"] == published.GRID_SAMPLES[row["model"]]
    }
    default, enlarged = cells["gpt2-xl", None], cells["gpt2-xl", published.ENLARGED]
    average = statistics.fmean(cells[name, None] for name in published.GRID_SAMPLES)
    found = {"default": default, "200 MiB": enlarged, "average": average}
    assert found == pytest.approx(published.SIMULATED, abs=0.05)
