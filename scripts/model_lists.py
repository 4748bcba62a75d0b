"""`scripts/models`: the parameter lists that `ringfence plan` knows, taken from models built on the meta device."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from ringfence_lab.plan.models import rolled

FOLDER: Final = Path(__file__).parents[1] / "lab" / "src" / "ringfence_lab" / "plan" / "data" / "models"


def _gpt2(**sizes: Any) -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def _bert(**sizes: Any) -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes))


def _llama(**sizes: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def _resnet() -> Any:
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))


_LARGE: Final = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_XL: Final = {"n_embd": 1600, "n_layer": 48, "n_head": 25}
_TINY: Final = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 1000}
_LLAMA_1B: Final = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
}  # fmt: skip
_LLAMA_70B: Final = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8,
}  # fmt: skip

# name: (how it is built, in words, builder, tokens of a sample or None for an image of 224 x 224)
MODELS: Final[dict[str, tuple[str, Callable[[], Any], int | None]]] = {
    "gpt2-tiny": ("GPT2LMHeadModel, 2 layers of 64", lambda: _gpt2(**_TINY), 128),
    "gpt2": ("GPT2LMHeadModel, default GPT2Config", _gpt2, 1024),
    "gpt2-xl": ("GPT2LMHeadModel, 48 layers of 1600, 25 heads", lambda: _gpt2(**_XL), 1024),
    "bert-base": ("BertForMaskedLM, default BertConfig", _bert, 512),
    "bert-large": ("BertForMaskedLM, 24 layers of 1024, 16 heads", lambda: _bert(**_LARGE), 512),
    "resnet50": ("ResNetForImageClassification, default ResNetConfig, 1000 labels", _resnet, None),
    "llama-1b": ("LlamaForCausalLM, 16 layers of 2048, 8 of 32 key-value heads", lambda: _llama(**_LLAMA_1B), 2048),
    "llama-7b": ("LlamaForCausalLM, default LlamaConfig: 32 layers of 4096", _llama, 2048),
    "llama-70b": ("LlamaForCausalLM, 80 layers of 8192, 8 of 64 key-value heads", lambda: _llama(**_LLAMA_70B), 2048),
}


def describe(name: str) -> dict[str, Any]:
    """What the file of a model says."""
    words, build, tokens = MODELS[name]
    with torch.device("meta"):
        model = build()
        sample = {"pixel_values": torch.empty(1, 3, 224, 224)} if tokens is None else {"input_ids": _tokens(tokens)}
    model.eval()  # a forward pass of batch normalisation over one image
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**sample)
    return {
        "source": f"{words}; transformers {transformers.__version__}, meta tensors",
        "sample": "an image of 224 x 224" if tokens is None else f"a sequence of {tokens} tokens",
        "forward_flops": counter.get_total_flops(),
        "parameters": rolled([parameter.numel() for parameter in model.parameters()]),
    }


def _tokens(count: int) -> torch.Tensor:
    return torch.zeros((1, count), dtype=torch.long)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/models", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="MODEL", help="default: all")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if anything is stale")
    options = parser.parse_args()
    stale = 0
    for name in options.names or MODELS:
        path = FOLDER / f"{name}.json"
        text = json.dumps(describe(name)) + "\n"
        if options.check:
            stale += not path.exists() or path.read_text() != text
            print(f"{name}: {'stale' if not path.exists() or path.read_text() != text else 'fresh'}")
        else:
            path.write_text(text)
            print(f"wrote {path.name}: {len(text)} bytes")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
