"""Models for the planner from a number of parameters, a config.json or a list of tensors, against real transformers models."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from ringfence.errors import ConfigurationError
from ringfence_lab.cli import plan_sources
from ringfence_lab.plan import models
from ringfence_lab.plan.architectures import EXACT

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 99}
# class of the configuration, class of the model, sizes
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("LlamaConfig", "LlamaForCausalLM", {}),
    ("LlamaConfig", "LlamaForCausalLM", {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("LlamaConfig", "LlamaForCausalLM", {**SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": 8}),
    ("MistralConfig", "MistralForCausalLM", {}),
    ("Qwen2Config", "Qwen2ForCausalLM", {}),
    ("Qwen2Config", "Qwen2ForCausalLM", {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("Qwen3Config", "Qwen3ForCausalLM", {}),
    ("Qwen3Config", "Qwen3ForCausalLM", {**SMALL, "num_key_value_heads": 2, "attention_bias": True}),
    ("GPT2Config", "GPT2LMHeadModel", {}),
    ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_inner": 100}),
    ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**SMALL, "attention_bias": False}),
    ("BertConfig", "BertForMaskedLM", {}),
    ("BertConfig", "BertForMaskedLM", SMALL),
]


def built(config: Any, kind: str) -> Any:
    with torch.device("meta"):
        return getattr(transformers, kind)(config)


@pytest.mark.parametrize(
    ("config", "kind", "sizes"), CASES, ids=lambda each: str(each) if isinstance(each, str) else ""
)
def test_a_config_gives_the_tensors_and_flops_of_the_real_model(config: str, kind: str, sizes: dict[str, Any]) -> None:
    parsed = getattr(transformers, config)(**sizes)
    model = built(parsed, kind)
    for content in (parsed.to_dict(), parsed.to_diff_dict()):  # as it is written, defaults are left out
        found = models.of_config({**content, "model_type": parsed.model_type}, "config.json", 32)
        assert found is not None
        assert list(found.parameters) == [parameter.numel() for parameter in model.parameters()]
        assert kind in found.source
    model.eval()
    tokens = torch.zeros(1, 32, dtype=torch.long, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=tokens)
    assert found is not None and found.forward_flops == counter.get_total_flops()


def test_every_exact_architecture_is_compared_with_transformers() -> None:
    assert {getattr(transformers, config)().model_type for config, _, _ in CASES} == set(EXACT)


@pytest.mark.parametrize("name", ["gpt2-xl", "llama-1b", "llama-70b"])
def test_configs_of_the_packages_models_give_the_same_model(name: str) -> None:
    from scripts.model_lists import MODELS

    with torch.device("meta"):
        config = MODELS[name][1]().config
    known = models.load(name)
    tokens = int(known.sample.split()[3])
    found = models.of_config(config.to_dict(), "config.json", tokens)
    assert found is not None
    assert (found.parameters, found.forward_flops) == (known.parameters, known.forward_flops)


def chosen(*arguments: str) -> models.Model:
    parser = argparse.ArgumentParser()
    plan_sources.add_to(parser)
    return plan_sources.model_of(parser.parse_args(arguments))


def test_another_architecture_is_built_on_the_meta_device(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=2)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config.to_dict(), "architectures": ["MixtralForCausalLM"]}))
    expected = [parameter.numel() for parameter in built(config, "MixtralForCausalLM").parameters()]
    found = chosen("--config", str(path))
    assert list(found.parameters) == expected
    assert "meta device" in found.source


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
    ("option", "content", "says"),
    [
        ("--tensors", "", "at least one size"),
        ("--tensors", "64\nlarge", "'large' is not the size or shape"),
        ("--tensors", "64x0", "not the size or shape"),
        ("--tensors", "[1, null]", "not the size or shape"),
        ("--tensors", "[1,", "is not JSON"),
        ("--config", "[]", "it has no model_type"),
        ("--config", "{", "is not JSON"),
        ("--config", '{"model_type": "llama", "hidden_size": -1}', "hidden_size is -1"),
        ("--config", '{"model_type": "llama", "hidden_size": "4k"}', "hidden_size is '4k'"),
        ("--config", '{"model_type": "telepathy"}', "cannot build a model of type telepathy"),
    ],
)
def test_a_file_that_describes_no_model_is_refused(tmp_path: Path, option: str, content: str, says: str) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=says):
        chosen(option, str(path))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--parameters", "0"], "whole and from 1"),
        (["--parameters", "1.5"], "whole and from 1"),
        (["--parameters", "nan"], "whole and from 1"),
        (["--config", "nowhere/config.json"], "cannot read nowhere/config.json"),
        (["--tokens", "128"], "--tokens is for"),
    ],
)
def test_options_that_name_no_model_are_refused(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        chosen(*arguments)
