"""Datasets of the library `datasets`: folders that it has saved, and datasets of the hub (paper §8, data)."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hetero_megatron.data.records import Raw, Shard, library_error, no_text
from hetero_megatron.data.tables import ROWS, check_column, raws
from hetero_megatron.errors import DataError

if TYPE_CHECKING:
    import datasets


class SavedDataset:
    """Rows of a dataset of the library `datasets` whose rows can be read in any order."""

    def __init__(self, told: str, dataset: "datasets.Dataset", text_key: str) -> None:
        """`told` is its name in messages.

        Raises:
            DataError: there is no such column of text.
        """
        self._told = told
        self._key = text_key
        self._fingerprint = str(getattr(dataset, "_fingerprint", ""))
        self._columns = tuple(dataset.column_names)
        check_column(told, dataset.features.arrow_schema, text_key)
        self._table = dataset.select_columns([text_key]).with_format("arrow")

    @property
    def names(self) -> tuple[str, ...]:
        """The dataset."""
        return (self._told,)

    @property
    def identity(self) -> str:
        """The column of the text, and what the dataset's library says of its content."""
        return f"dataset {self._key} {self._fingerprint}"

    def unit(self, file: int) -> str:
        """A row."""
        return "row"

    def before(self, shard: Shard) -> int:
        """How many rows come before the shard."""
        return shard.first

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that hold the rows."""
        return tuple(str(file["filename"]) for file in self._table.cache_files)

    def shards(self, size: int) -> tuple[Shard, ...]:
        """Runs of rows of about `size` bytes, in order."""
        count = len(self._table)
        each = max(1, self._table.data.nbytes // max(1, count))
        step = max(1, size // each)
        return tuple(
            Shard(0, first, min(first + step, count), each * (min(first + step, count) - first))
            for first in range(0, count, step)
        )

    def read(self, shard: Shard) -> Iterator[Raw]:
        """The rows of a shard, in order."""
        for first in range(shard.first, shard.stop, ROWS):
            table = self._table[first : min(first + ROWS, shard.stop)]
            place = first - shard.first
            for chunk in table.column(self._key).chunks:
                yield from raws(chunk, self._key, self._columns, place)
                place += len(chunk)


class StreamedDataset:
    """Rows of a dataset that the library `datasets` reads from the hub one after another: one shard of unknown size."""

    def __init__(self, told: str, dataset: "datasets.IterableDataset", text_key: str) -> None:
        """`told` is its name in messages."""
        self._told = told
        self._key = text_key
        self._dataset = dataset

    @property
    def names(self) -> tuple[str, ...]:
        """The dataset."""
        return (self._told,)

    @property
    def identity(self) -> str:
        """The dataset and the column of the text."""
        return f"stream {self._told} {self._key}"

    def unit(self, file: int) -> str:
        """A row."""
        return "row"

    def before(self, shard: Shard) -> int:
        """Nothing comes before the one shard."""
        return 0

    @property
    def paths(self) -> tuple[str, ...]:
        """No file is known."""
        return ()

    def shards(self, size: int) -> tuple[Shard, ...]:
        """One shard with everything."""
        return (Shard(0, 0, 0, 0),)

    def read(self, shard: Shard) -> Iterator[Raw]:
        """All rows, in order.

        Raises:
            DataError: the connection is lost, or the data cannot be read.
        """
        place = -1
        try:
            for place, row in enumerate(self._dataset):
                text = row.get(self._key)
                fault = "" if isinstance(text, str) else no_text(self._key, row)
                yield Raw(place, "" if fault else text, fault)
        except DataError:
            raise
        except Exception as error:  # any of a dozen libraries' errors
            raise DataError(
                f"{self._told}: reading failed after row {place}: {library_error(error)}"
            ) from error


def open_saved(path: str, split: str, text_key: str) -> SavedDataset:
    """A folder that `datasets` has saved.

    Raises:
        DataError: it cannot be read, has no such split or column, or `datasets` is not installed.
    """
    library = _datasets(path)
    try:
        found = library.load_from_disk(path)
    except Exception as error:  # any of a dozen libraries' errors
        raise DataError(f"{path} cannot be read as a saved dataset: {library_error(error)}") from error
    if isinstance(found, library.DatasetDict):
        if split not in found:
            raise DataError(f"{path} has no split {split!r}; its splits: {', '.join(map(str, found))}")
        found = found[split]
    return SavedDataset(path, found, text_key)


def open_hub(
    path: str, config: str | None, split: str, text_key: str, stream: bool
) -> SavedDataset | StreamedDataset:
    """A dataset of the hub: downloaded, or read as it comes.

    Raises:
        DataError: it cannot be had, for want of a connection for example; or `datasets` is not installed.
    """
    library = _datasets(path)
    told = f"hub dataset {path}"
    try:
        found: Any = library.load_dataset(path, config, split=split, streaming=stream)
    except Exception as error:  # any of a dozen libraries' errors
        raise DataError(
            f"{told} (split {split}) cannot be opened: {library_error(error)}; nothing of this name exists on this "
            "machine, so it was taken for a dataset of the Hugging Face hub: check the name and the connection"
        ) from error
    return StreamedDataset(told, found, text_key) if stream else SavedDataset(told, found, text_key)


def _datasets(path: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{path} needs the package datasets: pip install datasets") from error
    return datasets
