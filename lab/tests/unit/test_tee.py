"""Settings of the simulated GPU TEE: every figure of a preset has an origin, and wrong values are refused."""

from __future__ import annotations

import pickle
import re
import tomllib
from pathlib import Path

import pytest

from ringfence.errors import ConfigurationError
from ringfence_lab.accelerator import tee
from ringfence_lab.accelerator.tee import Tee

DATA = Path(tee.__file__).parent / "data"


@pytest.mark.parametrize("name", tee.names())
def test_every_figure_of_a_preset_has_a_source_or_a_reason(name: str) -> None:
    found = tee.load(name)
    assert set(found.origins) == set(tee.FIGURES)
    for figure, origin in found.origins.items():
        assert len(origin.text) > 10, figure
        assert origin.assumed or re.match(r"20\d\d", origin.date), figure
    assert set(tomllib.loads((DATA / f"{name}.toml").read_text())) <= {"title", "notes", "figures"}


@pytest.mark.parametrize("name", tee.names())
def test_a_preset_is_confidential_without_optimisations(name: str) -> None:
    found = tee.load(name)
    assert found.confidential
    assert found.dilation == 1
    assert not any(getattr(found, switch) for switch in tee.SWITCHES)
    assert pickle.loads(pickle.dumps(found)) == found  # worker processes get it so


def test_the_cpu_limits_an_h100() -> None:
    h100 = tee.load("h100")
    assert (h100.cpu_rate, h100.copy_overhead) == (4e9, 330e-6)
    assert h100.cpu_rate < h100.link_rate / 10
    assert h100.device_rate == h100.authentication_rate == 0  # in no time of its own


def test_authentication_limits_the_software_tee() -> None:
    """A large copy falls into the range that the abstract of Fastrack gives, as the preset says."""
    software = tee.load("software")
    stages = (software.cpu_rate, software.link_rate, software.device_rate, software.authentication_rate)
    assert min(stages) == software.authentication_rate
    assert 12.69 < sum(software.link_rate / rate for rate in stages) < 33.53
    assert "authentication_rate" in software.assumed()


@pytest.mark.parametrize("name", tee.names())
def test_a_dumped_preset_is_read_again(name: str) -> None:
    found = tee.load(name)
    again = tee.parse(tee.dump(found), name)
    assert again == found
    assert again.origins == found.origins


def test_changed_values_lose_their_source() -> None:
    found = tee.load("h100").with_values(cpu_rate=8e9, overlap=True, dilation=4)
    assert (found.cpu_rate, found.overlap, found.dilation) == (8e9, True, 4)
    assert found.assumed()["cpu_rate"] == tee.CHANGED
    assert found.link_rate == tee.load("h100").link_rate
    assert tee.parse(tee.dump(found), "changed").assumed()["cpu_rate"] == tee.CHANGED


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cpu_rat": 1e9}, "has no cpu_rat: it has authentication_parts"),
        ({"cpu_rate": 0}, "cpu_rate of a simulated TEE is from 1e3 to 1e18 bytes/s, not 0"),
        ({"device_rate": 10}, "bytes/s, or 0, not 10"),
        ({"link_rate": float("nan")}, "link_rate"),
        ({"peer_rate": True}, "is a number, not True"),
        ({"cpu_threads": 0}, "a whole number from 1 to 64, not 0"),
        ({"engines": 1.5}, "a whole number from 1 to 64, not 1.5"),
        ({"piece_bytes": 0}, "piece_bytes"),
        ({"copy_overhead": -1e-6}, "from 0 to 10 seconds"),
        ({"peer_overhead": float("inf")}, "from 0 to 10 seconds"),
        ({"dilation": 0.5}, "dilation of a simulated TEE is from 1 to 1e6, not 0.5"),
        ({"overlap": 1}, "overlap of a simulated TEE is True or False, not 1"),
    ],
)
def test_wrong_values_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        tee.load("h100").with_values(**changes)


def test_an_unknown_preset_is_named() -> None:
    with pytest.raises(ConfigurationError, match="'h900': there are h100, published, software"):
        tee.load("h900")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[figures]", "[figures", "simulated TEE mine: "),
        ("[figures]", "[numbers]", "unknown numbers"),
        ("engines =", "motors =", r"needs copy_overhead, .*, and nothing else"),
        ('reason = "PCIe 5.0', 'source = "PCIe 5.0', "link_rate: a figure is"),
        (', date = "2025"', "", "cpu_rate: a figure is"),
        ("value = 4e9", 'value = "4e9"', "cpu_rate of a simulated TEE is a number"),
    ],
)
def test_a_preset_with_a_mistake_is_refused(before: str, after: str, message: str) -> None:
    text = (DATA / "h100.toml").read_text()
    assert before in text
    with pytest.raises(ConfigurationError, match=message):
        tee.parse(text.replace(before, after), "mine")


def test_settings_are_compared_by_value() -> None:
    h100 = tee.load("h100")
    assert h100.with_values(engines=1) == h100
    assert len({h100, h100.with_values(engines=1), h100.with_values(engines=2)}) == 2
    assert isinstance(h100, Tee)
