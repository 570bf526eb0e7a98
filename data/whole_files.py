"""Files that are one document each, as records; a shard is some consecutive files."""

from collections.abc import Iterator

from hetero_megatron.data.corpus import Files
from hetero_megatron.data.records import Raw, Shard


class WholeFiles:
    """Every file of a corpus of files is a record."""

    def __init__(self, files: Files) -> None:
        """Nothing is read yet."""
        self._files = files

    @property
    def names(self) -> tuple[str, ...]:
        """The files."""
        return self.paths

    @property
    def identity(self) -> str:
        """Only the files count."""
        return "files"

    def unit(self, file: int) -> str:
        """A file."""
        return "file"

    def before(self, shard: Shard) -> int:
        """How many files come before the shard."""
        return shard.first

    @property
    def paths(self) -> tuple[str, ...]:
        """The files."""
        return tuple(self._files.path(index) for index in range(len(self._files)))

    def shards(self, size: int) -> tuple[Shard, ...]:
        """Runs of files of about `size` bytes, in order."""
        found: list[Shard] = []
        first, total = 0, 0
        for index in range(len(self._files)):
            total += self._files.size(index)
            if total >= size or index == len(self._files) - 1:
                found.append(Shard(first, first, index + 1, total))
                first, total = index + 1, 0
        return tuple(found)

    def read(self, shard: Shard) -> Iterator[Raw]:
        """The files of a shard, in order.

        Raises:
            DataError: one cannot be read, or has changed.
        """
        yield from (
            Raw(index - shard.first, self._files.read(index)) for index in range(shard.first, shard.stop)
        )
