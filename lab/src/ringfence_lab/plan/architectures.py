"""The parameters of common transformer architectures, computed from a Hugging Face `config.json` without building a model.

Exact for the architectures in `EXACT`: a test builds each with transformers on the meta device and compares every tensor. A
`config.json` leaves out what equals the default of its class, so the defaults that matter stand here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from ringfence.errors import ConfigurationError


class Tensor(NamedTuple):
    """One parameter tensor."""

    elements: int
    multiplies: bool = False  # whether each token is multiplied with it: weights of linear layers


class Architecture(NamedTuple):
    """What the planner needs to know about a model."""

    name: str  #            the class of transformers that it equals
    tensors: tuple[Tensor, ...]  # in order of registration
    head: int  #            elements of an output layer that shares its weights with the embedding; else 0
    attention: int  #       width of all heads together, times the number of layers
    positions: int  #       the longest sequence

    def forward_flops(self, tokens: int) -> int:
        """Return the floating point operations of a forward pass over one sequence."""
        linear = 2 * tokens * (sum(each.elements for each in self.tensors if each.multiplies) + self.head)
        return linear + 4 * tokens * tokens * self.attention  # scores, and values weighted by them


Config = Mapping[str, Any]


def _llama(config: Config) -> Architecture:
    """Llama, Mistral, Qwen2 and Qwen3 differ in biases and in norms of queries and keys."""
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, vocabulary = config["num_attention_heads"], config["vocab_size"]
    grouped = config["num_key_value_heads"] or heads
    width = config["head_dim"] or hidden // heads
    kind = config["model_type"]
    of_inputs = kind == "qwen2" or bool(config["attention_bias"])
    of_output = kind != "qwen2" and bool(config["attention_bias"])
    block: list[Tensor] = []
    for rows, biased in ((heads, of_inputs), (grouped, of_inputs), (grouped, of_inputs)):
        block += _linear(hidden, rows * width, biased)
    block += _linear(heads * width, hidden, of_output)
    if kind == "qwen3":
        block += [Tensor(width), Tensor(width)]
    for rows, columns in ((hidden, inner), (hidden, inner), (inner, hidden)):
        block += _linear(rows, columns, bool(config["mlp_bias"]))
    block += [Tensor(hidden), Tensor(hidden)]
    tied = bool(config["tie_word_embeddings"])
    tensors = [Tensor(vocabulary * hidden), *(block * layers), Tensor(hidden)]
    if not tied:
        tensors.append(Tensor(vocabulary * hidden, True))
    head = vocabulary * hidden if tied else 0
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    return Architecture(
        f"{name}ForCausalLM", tuple(tensors), head, heads * width * layers, config["max_position_embeddings"]
    )


def _gpt2(config: Config) -> Architecture:
    hidden, layers, vocabulary = config["n_embd"], config["n_layer"], config["vocab_size"]
    inner = config["n_inner"] or 4 * hidden
    norm = [Tensor(hidden), Tensor(hidden)]
    block = [*norm, *_linear(hidden, 3 * hidden), *_linear(hidden, hidden)]
    block += [*norm, *_linear(hidden, inner), *_linear(inner, hidden)]
    tensors = [Tensor(vocabulary * hidden), Tensor(config["n_positions"] * hidden), *(block * layers), *norm]
    tied = bool(config["tie_word_embeddings"])
    if not tied:
        tensors.append(Tensor(vocabulary * hidden, True))
    head = vocabulary * hidden if tied else 0
    return Architecture("GPT2LMHeadModel", tuple(tensors), head, hidden * layers, config["n_positions"])


def _gpt_neox(config: Config) -> Architecture:
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    vocabulary, biased = config["vocab_size"], bool(config["attention_bias"])
    norm = [Tensor(hidden), Tensor(hidden)]
    block = [*norm, *norm, *_linear(hidden, 3 * hidden, biased), *_linear(hidden, hidden, biased)]
    block += [*_linear(hidden, inner), *_linear(inner, hidden)]
    tensors = [Tensor(vocabulary * hidden), *(block * layers), *norm]
    tied = bool(config["tie_word_embeddings"])
    if not tied:
        tensors.append(Tensor(vocabulary * hidden, True))
    head = vocabulary * hidden if tied else 0
    positions = config["max_position_embeddings"]
    return Architecture("GPTNeoXForCausalLM", tuple(tensors), head, hidden * layers, positions)


def _bert(config: Config) -> Architecture:
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    vocabulary, positions = config["vocab_size"], config["max_position_embeddings"]
    norm = [Tensor(hidden), Tensor(hidden)]
    block = [*_linear(hidden, hidden) * 4, *norm, *_linear(hidden, inner), *_linear(inner, hidden), *norm]
    embeddings = [Tensor(rows * hidden) for rows in (vocabulary, positions, config["type_vocab_size"])]
    tensors = [*embeddings, *norm, *(block * layers), Tensor(vocabulary), *_linear(hidden, hidden), *norm]
    return Architecture("BertForMaskedLM", tuple(tensors), vocabulary * hidden, hidden * layers, positions)


def _linear(inputs: int, outputs: int, biased: bool = True) -> list[Tensor]:
    return [Tensor(inputs * outputs, True), *([Tensor(outputs)] if biased else [])]


_OF_LLAMA: Final = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048,
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
_OF_QWEN: Final = {
    **_OF_LLAMA, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}  # fmt: skip
# model_type: the defaults of its configuration class, and what computes it
EXACT: Final[dict[str, tuple[dict[str, Any], Callable[[Config], Architecture]]]] = {
    "llama": (_OF_LLAMA, _llama),
    "mistral": (
        {**_OF_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 4096 * 32},
        _llama,
    ),
    "qwen2": (_OF_QWEN, _llama),
    "qwen3": ({**_OF_QWEN, "head_dim": 128}, _llama),
    "gpt2": (
        {
            "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_inner": None,
            "tie_word_embeddings": True,
        },
        _gpt2,
    ),
    "gpt_neox": (
        {
            "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "intermediate_size": 24576,
            "max_position_embeddings": 2048, "attention_bias": True, "tie_word_embeddings": False,
        },
        _gpt_neox,
    ),
    "bert": (
        {
            "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072,
            "max_position_embeddings": 512, "type_vocab_size": 2,
        },
        _bert,
    ),
}  # fmt: skip


def of_config(config: Config) -> Architecture | None:
    """Return the architecture of a parsed `config.json`, or None if its model type is not among `EXACT`.

    Raises ConfigurationError if a size in it is not a positive whole number.
    """
    found = EXACT.get(str(config.get("model_type")))
    if found is None:
        return None
    defaults, compute = found
    values = {name: config.get(name, default) for name, default in defaults.items()}
    for name, problem in _problems(values, defaults):
        raise ConfigurationError(f"config.json: {name} is {problem}, and has to be a positive whole number")
    return compute({**values, "model_type": config["model_type"]})


def _problems(values: Config, defaults: Config) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(defaults[name], bool) or (value is None and defaults[name] is None):
            continue
        if name in ("num_key_value_heads", "head_dim") and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 32:
            yield name, repr(value)
