"""`ringfence bench collectives --device`: the options for tensors on a device, and what can be compared there."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from ringfence.errors import ConfigurationError
from ringfence_lab.bench import names

VARIANTS = "variants with --device:\n" + "\n".join(
    f"  {name:20} {what}" for name, what in names.DEVICE_VARIANTS.items()
)


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options to `bench collectives`."""
    parser.add_argument(
        "--device",
        choices=names.DEVICES,
        help="where the tensors are; sim is simulated and needs a C++ compiler. Default: the host",
    )
    parser.add_argument(
        "--copy-rate",
        type=_rates,
        default=[0.0],
        metavar="GB/S,…",
        help="of the simulated device, in each direction; default: as fast as the machine",
    )
    parser.add_argument(
        "--confidential", action="store_true", help="the simulated device copies as GPUs in confidential mode do"
    )


def variants_of(options: argparse.Namespace, defaults: Sequence[str]) -> list[str]:
    """Return the variants to compare, those of the baseline first.

    Raises ConfigurationError if one does not exist for these tensors, or an option is for others.
    """
    if options.device is None:
        if options.confidential or any(options.copy_rate):
            raise ConfigurationError("--copy-rate and --confidential are for the simulated device: add --device sim")
        return _known(options.variants or defaults, names.VARIANTS, "host tensors")
    if options.device != names.SIMULATED and (options.confidential or any(options.copy_rate)):
        raise ConfigurationError(f"--copy-rate and --confidential are for --device sim: {options.device} has its own")
    if options.busy:
        raise ConfigurationError("--busy is for host tensors: leave out --device")
    chosen = _known(options.variants or names.DEFAULT_ON_DEVICE, names.DEVICE_VARIANTS, f"tensors on {options.device}")
    for name in names.CUDA_VARIANTS:
        if name in chosen and options.device != "cuda":
            raise ConfigurationError(f"{name} does not know tensors on {options.device}: leave it out of --variants")
    return list(dict.fromkeys((*names.HOST, *chosen)))


def _known(chosen: Sequence[str], known: Mapping[str, str], where: str) -> list[str]:
    for name in chosen:
        if name not in known:
            raise ConfigurationError(f"--variants: {name!r} is none of {', '.join(known)}, which there are for {where}")
    return list(chosen)


def cases_of(options: argparse.Namespace, cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the cases on the device: each once for every copy rate."""
    if options.device is None:
        return [dict(case) for case in cases]
    return [
        {**case, "device": options.device, "copy_rate": rate * 1e9, "confidential": options.confidential}
        for case in cases
        for rate in options.copy_rate
    ]


def _rates(text: str) -> list[float]:
    try:
        rates = [float(each) for each in text.split(",")]
    except ValueError:
        rates = [-1.0]
    if not all(0 < rate < 1e6 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r}: write GB per second, such as 2,10")
    return rates
