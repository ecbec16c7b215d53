"""Parquet files that anybody may have written: few bytes of a file can stand for more rows than fit into memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

MAX_ROWS = 1_000_000
MAX_BYTES = 2 * 2**30  # of values, as they are in memory
BATCH = 256  # rows that are decoded before it is looked how large they are


def open_parquet(path: Path) -> pq.ParquetFile:
    """The file, of which nothing but its footer is read.

    Raises:
        ValueError: If it is a pipe or a device, or no Parquet.
        OSError: If it cannot be read.
    """
    if not path.is_file():
        raise ValueError(f"{str(path)!r} must be a file")
    return pq.ParquetFile(path)


def rows_of(file: pq.ParquetFile, most: int = MAX_ROWS, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The rows of an open file, or of some of its columns.

    Raises:
        ValueError: If it has more than `most` rows, or more than `MAX_BYTES` in memory.
    """
    rows: list[dict[str, Any]] = table_of(file, most, columns).to_pylist()
    return rows


def table_of(file: pq.ParquetFile, most: int = MAX_ROWS, columns: Sequence[str] | None = None) -> pa.Table:
    """The same as a table."""
    if file.metadata.num_rows > most:
        raise ValueError(f"rows must be at most {most}, got {file.metadata.num_rows}")
    batches, size = [], 0
    for batch in file.iter_batches(BATCH, columns=None if columns is None else list(columns)):
        size += batch.nbytes
        if size > MAX_BYTES:
            raise ValueError(f"values must have at most {MAX_BYTES} bytes, got more in {file.metadata.num_rows} rows")
        batches.append(batch)
    schema = file.schema_arrow if columns is None else pa.schema([file.schema_arrow.field(name) for name in columns])
    return pa.Table.from_batches(batches, schema if not batches else batches[0].schema)
