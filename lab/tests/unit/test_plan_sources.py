"""Models for the planner from a number of parameters or a list of tensors."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.errors import ConfigurationError
from ringfence_lab.cli import plan
from ringfence_lab.plan import models


def chosen(*arguments: str) -> models.Model:
    parser = argparse.ArgumentParser()
    plan.add_to(parser.add_subparsers())
    return plan.model_of(parser.parse_args(["plan", *arguments]))


@given(st.integers(1, 10**13))
def test_a_number_of_parameters_is_kept_exactly(count: int) -> None:
    found = models.of_count(count, 128)
    assert found.elements == count
    assert found is not None and found.forward_flops == 2 * count * 128
    assert min(found.parameters) > 0


def test_seven_billion_parameters_are_about_a_llama_of_that_size() -> None:
    found, known = chosen("--parameters", "6738415616"), models.load("llama-7b")
    assert found.elements == known.elements
    assert found is not None and found.forward_flops == pytest.approx(known.forward_flops, rel=0.1)
    assert 0.5 < len(models.blocks(found.parameters)) / 32 < 2


@pytest.mark.parametrize(
    "text",
    [
        "4096\n64x64\n# a comment\nlayer.bias 64   # with a name\n",
        "[4096, [64, 64], 64]",
        '{"a": 4096, "layer.weight": [64, 64], "layer.bias": [64]}',
    ],
)
def test_a_list_of_tensors_is_text_or_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tensors.txt"
    path.write_text(text)
    assert chosen("--tensors", str(path)).parameters == (4096, 4096, 64)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "at least one size"),
        ("64\nlarge", "'large' is not the size or shape"),
        ("64x0", "not the size or shape"),
        ("[1, null]", "not the size or shape"),
        ("[1,", "is not JSON"),
    ],
)
def test_a_file_that_describes_no_model_is_refused(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=says):
        chosen("--tensors", str(path))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--parameters", "0"], "whole and from 1"),
        (["--parameters", "1.5"], "whole and from 1"),
        (["--parameters", "nan"], "whole and from 1"),
        (["--tensors", "nowhere/tensors.txt"], "cannot read nowhere/tensors.txt"),
        (["--tokens", "128"], "--tokens is for"),
    ],
)
def test_options_that_name_no_model_are_refused(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        chosen(*arguments)
