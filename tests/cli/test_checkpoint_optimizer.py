"""`ringfence checkpoint convert` of a training's state: an optimizer takes back what it gave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ringfence import checkpoint
from ringfence.cli import main
from tests.unit.checkpoint_samples import is_same, key_file
from tests.unit.test_checkpoint_keys import NESTED, trained


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A state that is saved as `run`, with a key `key`, in the working folder."""
    monkeypatch.chdir(tmp_path)
    key_file(tmp_path)
    state = {"opt": trained()[1].state_dict(), **NESTED}
    checkpoint.save(state, "run", key="key")
    return state


def momenta(state: dict[str, Any]) -> list[torch.Tensor]:
    """Load the state of an optimizer into another one, and return its momenta."""
    model, optimizer = trained(1)
    optimizer.load_state_dict(state)
    return [optimizer.state[each]["momentum_buffer"] for each in model.parameters()]


def test_converted_to_torch_it_is_the_state_that_was_saved(saved: dict[str, Any]) -> None:
    assert main(["checkpoint", "convert", "run", "again", "--to", "sealed", "--key", "key"]) == 0
    assert main(["checkpoint", "convert", "again", "back.pt", "--to", "torch", "--key", "key"]) == 0
    found = torch.load("back.pt", weights_only=True)
    assert is_same(found, saved)
    assert is_same(momenta(found["opt"]), momenta(saved["opt"]))


def test_converted_to_dcp_it_loads_into_the_state_that_was_saved(saved: dict[str, Any]) -> None:
    """DCP itself has names only: the state that it loads into has the keys."""
    assert main(["checkpoint", "convert", "run", "back", "--to", "dcp", "--key", "key"]) == 0
    state: dict[str, Any] = {
        "opt": trained(1)[1].state_dict(),
        "both": {1: torch.zeros(2), "0": torch.ones(2)},
    }
    dcp.load(state, checkpoint_id="back", no_dist=True)
    assert is_same(state["both"], {key: saved["both"][key] for key in (1, "0")})
    assert is_same(momenta(state["opt"]), momenta(saved["opt"]))


def test_converted_to_dcp_it_says_what_dcp_cannot_hold(
    saved: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "convert", "run", "back", "--to", "dcp", "--key", "key", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert {"opt.state", "both", "nested.7", "lists.4.1"} <= set(done["integer_keys"])
    assert {"empty", "lists.0", "nested.7.8"} <= set(done["empty_dicts"])
    assert main(["checkpoint", "convert", "run", "other", "--to", "dcp", "--key", "key"]) == 0
    assert "Plain DCP holds keys as texts only" in capsys.readouterr().out
    assert main(["checkpoint", "convert", "run", "all.pt", "--to", "torch", "--key", "key"]) == 0
    assert "Plain DCP" not in capsys.readouterr().out


def test_converted_from_torch_to_dcp_keys_that_cannot_be_kept_are_refused(saved: dict[str, Any]) -> None:
    torch.save({"a": {True: torch.ones(1)}}, "bad.pt")
    assert main(["checkpoint", "convert", "bad.pt", "new", "--to", "dcp"]) == 1
    assert not Path("new").exists()
