"""The columns of the two upper layers and their types, checked whenever a layer is written or read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ringfence.errors import ConfigurationError
from ringfence_lab.bench.names import STAGES

MADE_FROM: Final = b"ringfence.made_from"  # a digest of the layer below, in a file's metadata
MACHINES: Final = b"ringfence.machines"  # JSON: the facts about each machine that the layer's rows name
_VERSION: Final = 3  # of what is made, not of the columns alone: layers of an older one are made again

Row = dict[str, Any]


def _column(name: str, kind: Any, optional: bool = False) -> Any:
    return pa.field(name, kind, nullable=optional)


_SETTINGS: Final = [
    _column("cell", pa.string()),
    _column("kind", pa.string()),
    _column("operation", pa.string(), optional=True),
    _column("size", pa.int64(), optional=True),
    _column("model", pa.string(), optional=True),
    _column("strategy", pa.string(), optional=True),
    _column("device", pa.string(), optional=True),
    _column("bucket_mb", pa.float64(), optional=True),
    _column("wire", pa.string()),
    _column("workers", pa.int32()),
    _column("hosts", pa.int32()),
    _column("rate_bits", pa.int64(), optional=True),
    _column("busy", pa.bool_()),
    _column("variant", pa.string()),
]
_STAGE_COLUMNS: Final = [
    _column(f"stage_{stage}", pa.float64(), optional=True) for stage in STAGES
]  # ns, mean of workers
_ORIGIN: Final = [
    _column("machine", pa.string()),
    _column("source", pa.string()),
    _column("scaled", pa.float64()),  # how many times the real step is as long as the one replayed
]
_TEE: Final = [  # of simulated GPU TEEs; empty in other rows
    _column("preset", pa.string(), optional=True),
    _column("changed", pa.string(), optional=True),  # the input that differs from the preset's, with its factor
    _column("samples", pa.int32(), optional=True),  # of a worker's step
    _column("all_reduces", pa.int32(), optional=True),  # of a whole step, before it was cut
    _column("load", pa.float64(), optional=True),  # cores of the machine for which dilations were chosen
    _column("host_cores", pa.float64(), optional=True),  # of a host of ringfence
    _column("dilation", pa.float64(), optional=True),  # of this variant: `seconds` are wall_seconds without it
    _column("wall_seconds", pa.float64(), optional=True),  # as they passed on this machine
    _column("late_seconds", pa.float64(), optional=True),  # for which simulated time stood still
]

TIDY: Final = pa.schema(
    [
        *_SETTINGS,
        _column("round", pa.int32()),
        _column("seconds", pa.float64()),
        _column("cpu_seconds", pa.float64()),
        _column("sent_bytes", pa.float64()),
        *_STAGE_COLUMNS,
        _column("run", pa.string()),
        _column("date", pa.timestamp("ms", tz="UTC")),
        *_ORIGIN,
        *_TEE,
    ]
)
SUMMARY: Final = pa.schema(
    [
        *_SETTINGS,
        _column("rounds", pa.int32()),
        *[_column(name, pa.float64()) for name in ("seconds", "seconds_low", "seconds_high")],
        *[_column(name, pa.float64()) for name in ("cpu_seconds", "sent_bytes")],
        *[_column(name, pa.float64()) for name in ("ratio", "ratio_low", "ratio_high")],
        _column("resolution", pa.float64()),
        _column("scored", pa.bool_()),
        *_STAGE_COLUMNS,
        *_ORIGIN,
        *_TEE,
    ]
)
SETTING_COLUMNS: Final = [field.name for field in _SETTINGS]
ORIGIN_COLUMNS: Final = [field.name for field in _ORIGIN]
TEE_COLUMNS: Final = [field.name for field in _TEE]
STAGE_COLUMNS: Final = [field.name for field in _STAGE_COLUMNS]


class SchemaError(ConfigurationError):
    """A layer is invalid; it can be rebuilt from the layer below."""


def batches(rows: Iterator[Row], schema: Any, size: int, where: object) -> Iterator[Any]:
    """Yield the rows as record batches of this schema, so that no more than `size` rows are in memory at once."""
    while chunk := list(itertools.islice(rows, size)):
        try:
            batch = pa.RecordBatch.from_pylist(chunk, schema=schema)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise SchemaError(f"{where}: {error}") from None
        yield checked(batch, schema, str(where))


def checked(batch: Any, schema: Any, where: str) -> Any:
    """Return the batch if its columns, types and values are valid under the schema.

    Raises SchemaError otherwise.
    """
    _check_columns(batch.schema, schema, where)
    for field in schema:
        if not field.nullable and batch.column(field.name).null_count:
            raise SchemaError(f"{where}: {field.name} is missing in some rows")
    seconds = batch.column("seconds")
    if not pc.all(pc.and_(pc.is_finite(seconds), pc.greater(seconds, 0.0)), min_count=0).as_py():
        raise SchemaError(f"{where}: seconds must be finite and above zero")
    return batch


def opened(path: Path, schema: Any) -> Any:
    """Open the file of a layer and check its schema."""
    try:
        file = pq.ParquetFile(path)
    except FileNotFoundError:
        raise SchemaError(f"{path} is not there; `ringfence study` makes it") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise SchemaError(f"{path} cannot be read ({error}); `ringfence study rebuild` makes it again") from None
    _check_columns(file.schema_arrow, schema, path)
    return file


def _check_columns(found: Any, schema: Any, where: object) -> None:
    if not found.equals(schema, check_metadata=False):
        raise SchemaError(
            f"{where}: the columns are not those of this version; `ringfence study rebuild` makes them again"
        )


def made_from(path: Path, schema: Any) -> str:
    """Return the digest of what a layer was made from, or nothing if it does not exist or is not readable."""
    try:
        metadata = opened(path, schema).metadata.metadata or {}
    except SchemaError:
        return ""
    return str(metadata.get(MADE_FROM, b"").decode())


def origin(digest: str) -> str:
    """What a layer made from these bytes says of itself: another version of this code or of the library makes it anew."""
    return f"{_VERSION} pyarrow {pa.__version__} {digest}"
