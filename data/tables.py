"""Tables with a column of text; those in parquet files (paper §8, data)."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_megatron.data.records import Raw, Shard, library_error, no_text
from hetero_megatron.errors import DataError

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

# Rows that are read together.
ROWS = 1000


class ParquetFiles:
    """Rows of parquet files; a shard is some row groups."""

    def __init__(self, paths: tuple[str, ...], text_key: str = "text") -> None:
        """Read the footer of every file.

        Raises:
            DataError: a file is no parquet file, or has no such column of text; or pyarrow is not installed.
        """
        self._paths = paths
        self._key = text_key
        for path in paths:
            with _open_parquet(path) as file:
                check_column(path, file.schema_arrow, text_key)

    @property
    def names(self) -> tuple[str, ...]:
        """The files."""
        return self._paths

    @property
    def identity(self) -> str:
        """The kind of file and the column of the text."""
        return f"parquet {self._key}"

    def unit(self, file: int) -> str:
        """A row."""
        return "row"

    def before(self, shard: Shard) -> int:
        """How many rows the shard's file has before it."""
        with _open_parquet(self._paths[shard.file]) as file:
            return sum(file.metadata.row_group(group).num_rows for group in range(shard.first))

    @property
    def paths(self) -> tuple[str, ...]:
        """The files."""
        return self._paths

    def shards(self, size: int) -> tuple[Shard, ...]:
        """Runs of row groups of about `size` bytes, in order."""
        found: list[Shard] = []
        for number, path in enumerate(self._paths):
            with _open_parquet(path) as file:
                groups = [
                    file.metadata.row_group(each).total_byte_size for each in range(file.num_row_groups)
                ]
            first, total = 0, 0
            for group, bytes_ in enumerate(groups):
                total += bytes_
                if total >= size or group == len(groups) - 1:
                    found.append(Shard(number, first, group + 1, total))
                    first, total = group + 1, 0
        return tuple(found)

    def read(self, shard: Shard) -> Iterator[Raw]:
        """The rows of a shard, in order.

        Raises:
            DataError: the file cannot be read.
        """
        path = self._paths[shard.file]
        with _open_parquet(path) as file:
            place = 0
            groups = list(range(shard.first, shard.stop))
            batches = file.iter_batches(ROWS, groups, columns=[self._key], use_threads=False)
            try:
                for batch in batches:
                    yield from raws(batch.column(0), self._key, file.schema_arrow.names, place)
                    place += len(batch)
            except (OSError, ValueError) as error:  # what pyarrow raises of a damaged file
                raise DataError(f"{path} is damaged: {library_error(error)}") from error


def _open_parquet(path: str) -> "pyarrow.parquet.ParquetFile":
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path} needs the package pyarrow: pip install pyarrow") from error
    try:
        return pyarrow.parquet.ParquetFile(path, memory_map=Path(path).stat().st_size > 0)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a parquet file: {library_error(error)}") from error


def check_column(told: str, schema: "pyarrow.Schema", key: str) -> None:
    """Refuse a table without a column of text of this name; `told` is the table's.

    Raises:
        DataError: naming the columns.
    """
    import pyarrow.types as types

    names = ", ".join(f"{field.name} ({field.type})" for field in schema) or "none"
    if key not in schema.names:
        raise DataError(f'{told}: there is no column "{key}" (text_key); columns: {names}')
    kind = schema.field(key).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    ):
        raise DataError(f'{told}: column "{key}" (text_key) is of type {kind}, not text; columns: {names}')


def raws(column: Any, key: str, columns: "tuple[str, ...] | list[str]", first: int) -> Iterator[Raw]:
    """The values of an arrow array as bytes, so that invalid UTF-8 in one row does not stop the others."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    column = column.cast(pyarrow.large_binary() if str(column.type).startswith("large") else pyarrow.binary())
    for place, text in enumerate(column.to_pylist(), first):
        if text is None:
            row: Mapping[str, object] = dict.fromkeys(columns)
            yield Raw(place, fault=no_text(key, row))
        else:
            yield Raw(place, text)
