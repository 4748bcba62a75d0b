"""Rows of a layer by the values of their columns.

Values are bound as Arrow scalars of the column's type in a filter expression: no query is ever put together as text, so nothing
that somebody types can be more than a value. pyarrow has the layers open already; an SQL engine would be a second way in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from ringfence.errors import ConfigurationError
from ringfence.lab.study.schema import checked, opened


def rows(path: Path, schema: Any, wanted: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Rows whose columns have one of the wanted values each (None: has no value), in the order of the layer."""
    opened(path, schema)  # says what to do if the layer is missing or of another version
    scanner = ds.dataset(path, format="parquet").scanner(filter=_filter(schema, wanted), batch_size=5_000)
    for batch in scanner.to_batches():
        if batch.num_rows:
            yield from checked(batch, schema, str(path)).to_pylist()


def _filter(schema: Any, wanted: Mapping[str, Sequence[Any]]) -> Any:
    whole = None
    for name, values in wanted.items():
        if name not in schema.names:
            raise ConfigurationError(f"no column is called {name!r}; there are {', '.join(schema.names)}")
        each = _one_of(name, schema.field(name).type, values)
        whole = each if whole is None else whole & each
    return whole


def _one_of(name: str, kind: Any, values: Sequence[Any]) -> Any:
    whole = None
    for value in values:
        if value is None:
            each = ds.field(name).is_null()
        else:
            try:
                each = ds.field(name) == pa.scalar(value, type=kind)
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
                raise ConfigurationError(f"{name}: {value!r} is no {kind}") from None
        whole = each if whole is None else whole | each
    return whole
