"""Writes the parameter lists that `ringfence plan` knows, from models built on the meta device.

`python -m scripts.model_lists [MODEL...]`; then `git diff` says what changed. Needs torch and transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from ringfence_lab.plan.models import rolled

FOLDER: Final = Path(__file__).parents[1] / "lab" / "src" / "ringfence_lab" / "plan" / "data" / "models"


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

# name: (how it is built, in words, class, sizes, tokens of a sample or None for an image of 224 x 224)
MODELS: Final[dict[str, tuple[str, str, dict[str, Any], int | None]]] = {
    "gpt2-tiny": ("2 layers of 64", "GPT2LMHeadModel", _TINY, 128),
    "gpt2": ("default GPT2Config", "GPT2LMHeadModel", {}, 1024),
    "gpt2-xl": ("48 layers of 1600, 25 heads", "GPT2LMHeadModel", _XL, 1024),
    "bert-base": ("default BertConfig", "BertForMaskedLM", {}, 512),
    "bert-large": ("24 layers of 1024, 16 heads", "BertForMaskedLM", _LARGE, 512),
    "resnet50": ("default ResNetConfig, 1000 labels", "ResNetForImageClassification", {"num_labels": 1000}, None),
    "llama-1b": ("16 layers of 2048, 8 of 32 key-value heads", "LlamaForCausalLM", _LLAMA_1B, 2048),
    "llama-7b": ("default LlamaConfig: 32 layers of 4096", "LlamaForCausalLM", {}, 2048),
    "llama-70b": ("80 layers of 8192, 8 of 64 key-value heads", "LlamaForCausalLM", _LLAMA_70B, 2048),
}


def describe(name: str) -> dict[str, Any]:
    """What the file of a model says."""
    words, kind, sizes, tokens = MODELS[name]
    build = getattr(transformers, kind)
    with torch.device("meta"):
        model = build(build.config_class(**sizes))
        images, texts = torch.empty(1, 3, 224, 224), torch.zeros((1, tokens or 0), dtype=torch.long)
    model.eval()  # a forward pass of batch normalisation over one image
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(images if tokens is None else texts)
    return {
        "source": f"{kind}, {words}; transformers {transformers.__version__}, meta tensors",
        "sample": "an image of 224 x 224" if tokens is None else f"a sequence of {tokens} tokens",
        "forward_flops": counter.get_total_flops(),
        "parameters": rolled([parameter.numel() for parameter in model.parameters()]),
    }


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        (FOLDER / f"{name}.json").write_text(json.dumps(describe(name)) + "\n")
