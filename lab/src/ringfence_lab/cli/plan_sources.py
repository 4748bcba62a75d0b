"""The models that `ringfence plan` is asked about: by name, number of parameters, config.json or list of tensors."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringfence.errors import ConfigurationError
from ringfence_lab.plan import models
from ringfence_lab.plan.models import Model

DEFAULT = "gpt2-xl"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a model."""
    group = parser.add_argument_group("model").add_mutually_exclusive_group()
    group.add_argument("--model", metavar="NAME", help=f"a model of `plan models` (default: {DEFAULT})")
    group.add_argument("--parameters", type=_count, metavar="N", help="only its number of parameters, such as 7e9")
    group.add_argument("--config", type=Path, metavar="FILE", help="the config.json of a Hugging Face model")
    group.add_argument("--tensors", type=Path, metavar="FILE", help="a list of tensor sizes or shapes, as text or JSON")
    group.add_argument(
        "--trace",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="a recorded job: what torch.profiler or its ExecutionTraceObserver wrote, .json or .json.gz, of one or more ranks",
    )
    parser.add_argument(
        "--tokens", type=_tokens, metavar="N", help="of a sample, unless --model is given (default: 2048)"
    )


def model_of(options: argparse.Namespace) -> Model:
    """Return the model that the options choose. Raises ConfigurationError if a file cannot be read or understood."""
    if options.parameters is not None:
        return models.of_count(options.parameters, options.tokens or models.TOKENS)
    if options.tensors is not None:
        sizes = list(_sizes(_text(options.tensors), options.tensors.name))
        return models.of_tensors(sizes, options.tensors.name, options.tokens or models.TOKENS)
    if options.config is not None:
        config = _config(options.config)
        found = models.of_config(config, options.config.name, options.tokens)
        return found or _built(config, options.config.name, options.tokens or models.TOKENS)
    if options.tokens is not None:
        raise ConfigurationError("--tokens is for --parameters, --config and --tensors: a named model has its own")
    return models.load(options.model or DEFAULT)


def _config(path: Path) -> dict[str, Any]:
    config = _json(_text(path), path)
    if not isinstance(config, dict) or "model_type" not in config:
        raise ConfigurationError(f"{path} is not a config.json of a Hugging Face model: it has no model_type")
    return config


def _built(config: dict[str, Any], name: str, tokens: int) -> Model:
    """Build a model of another architecture on the meta device, without weights. Needs torch and transformers."""
    kind = config["model_type"]
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ConfigurationError(
            f'{name}: models of type {kind} are counted with transformers ({error}): python -m pip install "transformers>=5.0"'
        ) from None
    try:
        parsed = transformers.AutoConfig.for_model(**config)
        classes = [getattr(transformers, each, None) for each in config.get("architectures") or ()]
        with torch.device("meta"):
            model = classes[0](parsed) if classes and classes[0] else transformers.AutoModel.from_config(parsed)
    except (AttributeError, ImportError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{name}: transformers cannot build a model of type {kind}: {error}") from None
    sizes = [parameter.numel() for parameter in model.parameters()]
    found = models.of_tensors(sizes, name, tokens)
    source = f"{type(model).__name__}, built from {name} on the meta device; transformers {transformers.__version__}"
    return Model(found.name, source, found.parameters, found.sample, found.forward_flops)


def _sizes(text: str, name: str) -> Iterator[int]:
    """The elements of each tensor: of JSON, or of a text with a size or a shape at the end of each line."""
    if text.lstrip().startswith(("[", "{")):
        content = _json(text, Path(name))
        items = content.values() if isinstance(content, dict) else content
        for item in items:
            yield _elements(item if isinstance(item, list) else [item], name, json.dumps(item))
        return
    for line in text.splitlines():
        entry = line.partition("#")[0].strip()
        if entry:
            yield _elements(re.split(r"[x×]", entry.split()[-1]), name, entry)


def _elements(shape: list[Any], name: str, entry: str) -> int:
    try:
        sizes = [int(each) for each in shape]
    except (TypeError, ValueError):
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ConfigurationError(f"{name}: {entry!r} is not the size or shape of a tensor, such as 4096 or 4096x11008")
    return math.prod(sizes)


def _json(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from None


def _count(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 7e9") from None


def _tokens(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if not 0 < value <= 1 << 24:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens")
    return value
