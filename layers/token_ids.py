"""Refuse token ids that the vocabulary does not have, with the same words at every tensor-parallel degree."""

from torch import Tensor

from hetero_megatron.errors import LayerError
from hetero_megatron.runtime.batch import IGNORE


def check_ids(what: str, ids_T: Tensor, vocab_size: int) -> None:
    """Look for an id outside [0, vocab_size) that is not IGNORE; on the CPU only, a GPU would have to wait.

    Raises:
        LayerError: the first such id. Vocabulary shards would not notice: an id that no rank holds adds zero.
    """
    if ids_T.device.type != "cpu" or not ids_T.numel():
        return
    smallest, largest = ids_T.aminmax()
    if largest < vocab_size and smallest >= 0:
        return
    outside = (ids_T < 0).logical_or_(ids_T >= vocab_size).logical_and_(ids_T != IGNORE)
    if outside.any():
        raise LayerError(
            f"{what} {int(ids_T[outside][0])} is not in the vocabulary, which has ids 0-{vocab_size - 1}"
        )
