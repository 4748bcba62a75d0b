"""`ringfence plan int8`: below which bandwidth int8 on the wire pays, for a sum of a size."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from ringfence.cli.terminal import table, wrap
from ringfence.errors import ConfigurationError
from ringfence_lab.bench.units import bytes_of, size_text, time_text
from ringfence_lab.cli.options import parsed
from ringfence_lab.plan import quantised

if TYPE_CHECKING:
    from ringfence_lab.plan.hardware import Hardware
    from ringfence_lab.plan.quantised import Codec

RATES: Final = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0)  # Gbit/s


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options; those of `plan` itself say for which workers and hardware."""
    parser.add_argument(
        "--size", type=parsed(bytes_of), default=25 << 20, metavar="SIZE", help="of the tensor; default: 25MiB"
    )
    parser.add_argument(
        "--measure", action="store_true", help="quantise here, instead of taking figures that are shipped"
    )


def predict(profile: Hardware, workers: int, size: int, measure: bool) -> dict[str, Any]:
    """Return the predictions as JSON has them."""
    if workers < 2:
        raise ConfigurationError("one worker sends nothing: give --workers")
    codec: Codec = quantised.SHIPPED
    if measure:
        from ringfence_lab.bench import codec as measured  # needs torch

        codec = measured.measure()
    limited = {rate: profile.with_values(network_rate=rate) for rate in RATES}
    pays_below = quantised.pays_below(profile, workers, size, codec)
    return {
        "hardware": profile.name,
        "workers": workers,
        "size": size,
        "codec": {"measured": measure, **asdict(codec)},
        "pays_below": pays_below if math.isfinite(pays_below) else None,
        "rates": [
            {
                "rate": rate,
                "float32": quantised.float32_seconds(each, workers, size),
                "int8": quantised.int8_seconds(each, workers, size, codec),
            }
            for rate, each in limited.items()
        ],
    }


def as_text(found: dict[str, Any]) -> str:
    """Lay out predictions."""
    rows = [
        (
            f"{each['rate']:g} Gbit/s",
            time_text(each["float32"]),
            time_text(each["int8"]),
            f"{each['float32'] / each['int8']:.2f}",
        )
        for each in found["rates"]
    ]
    what = f"all_reduce, {size_text(found['size'])}, {found['workers']} workers, {found['hardware']}"
    limit = found["pays_below"]
    if limit is None:
        said = "int8 pays at every bandwidth."
    elif limit == 0:
        said = "int8 does not pay: messages this small are bound by latency."
    else:
        said = f"int8 pays below {limit:.3g} Gbit/s."
    codec = found["codec"]
    where = "measured here" if codec["measured"] else "shipped; --measure measures here"
    costs = f"{codec['quantise'] * 1e9:.2f} ns a byte to quantise, {codec['read'] * 1e9:.2f} to read back ({where})"
    times = table([("bandwidth of a node", "float32", "int8", "times faster"), *rows])
    return "\n".join([what, times, wrap(f"{said} On a core: {costs}.")])
