"""In which order documents are visited: a shuffle per pass that follows from the seed alone."""

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.errors import DataError


def epoch_order(documents: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Document numbers in the order in which pass `epoch` visits them: each once, another order in every pass.

    The generator is numpy's legacy Mersenne Twister, whose stream numpy promises never to change, so that a run
    resumed elsewhere sees the same order.

    Raises:
        DataError: there is no document, or the seed or epoch is negative.
    """
    if documents < 1:
        raise DataError("there is no document to put in order")
    if seed < 0 or epoch < 0:
        raise DataError(f"seed {seed} and epoch {epoch} must not be negative")
    words = [seed % 2**32, seed // 2**32 % 2**32, epoch % 2**32]
    return np.random.RandomState(words).permutation(documents).astype(np.int64)


def document_at(documents: int, seed: int, index: int) -> int:
    """The document that the endless stream of passes holds at place `index`."""
    epoch, place = divmod(index, max(documents, 1))
    return int(epoch_order(documents, seed, epoch)[place])
