"""Text that is turned into tokens as it is read, one document after another (paper §8, data)."""

import json
import os
import zlib
from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.data.records import Counts, Policy, Reader, texts
from hetero_megatron.data.tokenizer import Tokenizer
from hetero_megatron.errors import DataError

_SHARD_BYTES = 2**25


class TextStream:
    """A Stream over records: every pass has them in the order of the source.

    Empty and bad records are left out and do not count; what is skipped to go on from a place is read, but not
    turned into tokens. Text without a token, which is not known before, is a document of the end token alone.
    """

    def __init__(self, reader: Reader, tokenizer: Tokenizer, policy: Policy) -> None:
        """Nothing is read yet."""
        self._reader = reader
        self._tokenizer = tokenizer
        self._policy: Policy = policy

    @property
    def fingerprint(self) -> str:
        """Eight letters, equal for streams of equal documents: by names and sizes of files, tokenizer and policy."""
        files = [(os.path.basename(path), os.path.getsize(path)) for path in self._reader.paths]
        facts = [self._reader.identity, files, self._tokenizer.fingerprint, self._policy]
        return f"{zlib.crc32(json.dumps(facts).encode()):08x}"

    def read(self, epoch: int, first: int) -> Iterator[NDArray[np.int64]]:
        """The documents of pass `epoch` from number `first` on.

        Raises:
            DataError: a record is refused, or there is no document at all.
        """
        counts = Counts()
        found = self._texts(counts)
        skipped = sum(1 for _ in islice(found, first))
        any_left = False
        for text in found:
            any_left = True
            yield self._tokenizer.encode(text)
        if not any_left and not skipped:
            raise DataError(f"{self._reader.names[0]} has no document with text: {counts}")

    def _texts(self, counts: Counts) -> Iterator[str]:
        for shard in self._reader.shards(_SHARD_BYTES):
            for _, text in texts(self._reader, shard, self._policy, counts):
                yield text
