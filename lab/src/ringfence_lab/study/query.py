"""Rows of a layer by the values of their columns.

Values are bound as an Arrow array of the column's type in a filter expression: no query is put together as text, so nothing
that a user types can be more than a value. pyarrow has the layers open already; an SQL engine would be a second interface.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from ringfence.errors import ConfigurationError
from ringfence_lab.study.schema import checked, opened


def rows(path: Path, schema: Any, filters: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows whose columns have one of the given values each (None: no value), in the order of the layer."""
    opened(path, schema)  # says what to do if the layer is missing or of another version
    scanner = ds.dataset(path, format="parquet").scanner(filter=_filter(schema, filters), batch_size=5_000)
    for batch in scanner.to_batches():
        if batch.num_rows:
            yield from checked(batch, schema, str(path)).to_pylist()


def _filter(schema: Any, filters: Mapping[str, Sequence[Any]]) -> Any:
    whole = None
    for name, values in filters.items():
        if name not in schema.names:
            raise ConfigurationError(f"no column is called {name!r}; there are {', '.join(schema.names)}")
        kind = schema.field(name).type
        try:
            each = ds.field(name).isin(pa.array(values, type=kind))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            raise ConfigurationError(f"{name}: {', '.join(map(repr, values))} is no {kind}") from None
        whole = each if whole is None else whole & each
    return whole
