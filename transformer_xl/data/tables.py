"""Texts in a column of a table: Parquet, Arrow (also of Hugging Face's datasets), CSV and TSV, read row by row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ..mistake import Mistake, printable
from ..runtime.files import check_unpacked, plain_file, read_errors

BINARY, PLAIN = (".parquet", ".arrow"), (".csv", ".tsv")
"""Tables by their names. Plain ones may also be read as text, so they are tables only where a column is named."""
_ROWS = 1 << 7
"""Number of rows to read at a time. A row may hold a megabyte, of which the file has a thousandth: repeated texts are
stored once."""


def is_table(file: Path, column: str = "") -> bool:
    """Whether the texts of a file are in a column of a table."""
    return file.suffix in BINARY or (bool(column) and file.suffix in PLAIN)


def row_texts(file: Path, column: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """The texts of the rows from `start` to `end`, as UTF-8; empty where there is none.

    Args:
        column: its name; "": `text`, or the only column of texts.

    Raises:
        Mistake: the file is damaged, or has no such column of texts.
    """
    advice = "Write it again, or name another column."
    with read_errors(file, advice, ValueError, KeyError, NotImplementedError):
        batches, size = _batches(plain_file(file), column), 0
        parts = (batch.slice(first, _ROWS) for batch in batches for first in range(0, len(batch), _ROWS))
        for text in islice((text for part in parts for text in part.to_pylist()), start, end):
            encoded = (text or "").encode("utf-8", "surrogatepass")
            size += len(encoded)
            check_unpacked(file, size)
            yield encoded


def _batches(file: Path, column: str) -> Iterator[Any]:
    """The column, piece by piece, as arrays of texts."""
    try:
        import pyarrow
        from pyarrow import csv, ipc, parquet
    except ModuleNotFoundError:
        raise Mistake(f"{file} needs pyarrow to be read. Install it: pip install pyarrow.") from None
    if file.suffix == ".parquet":
        with parquet.ParquetFile(file) as table:
            name = _column_of(file, table.schema_arrow, column)
            yield from (batch.column(0) for batch in table.iter_batches(_ROWS, columns=[name]))
    elif file.suffix == ".arrow":
        with pyarrow.memory_map(str(file)) as source:
            framed = source.read(6) == b"ARROW1"
            source.seek(0)
            table = ipc.open_file(source) if framed else ipc.open_stream(source)
            name = _column_of(file, table.schema, column)
            batches = map(table.get_batch, range(table.num_record_batches)) if framed else table
            yield from (batch.column(name) for batch in batches)
    else:
        parse = csv.ParseOptions(delimiter="\t" if file.suffix == ".tsv" else ",", newlines_in_values=True)
        texts = csv.ConvertOptions(include_columns=[column], column_types={column: pyarrow.string()})
        yield from (batch.column(0) for batch in csv.open_csv(file, parse_options=parse, convert_options=texts))


def _column_of(file: Path, schema: Any, column: str) -> str:
    """The name of the column of texts to read."""
    kinds = {each.name: re.sub(r"dictionary<values=(\w+), .*", r"\1", str(each.type)) for each in schema}
    texts = [name for name, kind in kinds.items() if kind in ("string", "large_string", "string_view")]
    name = column or ("text" if "text" in texts else texts[0] if len(texts) == 1 else "")
    if name not in texts:
        asked = f'a column of texts "{name}"' if column else 'a column of texts "text", or only one'
        found = ", ".join(f"{printable(each.name)} ({each.type})" for each in list(schema)[:20])
        one = " Name one by --corpus.column in training, or rename it." if texts else " Write the texts into one."
        raise Mistake(f"{file} must have {asked}; its columns are {found}.{one}")
    return name
