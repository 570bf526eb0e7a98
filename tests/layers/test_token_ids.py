"""Ids that the vocabulary does not have are refused with a message, IGNORE is let through."""

import pytest
import torch

from hetero_megatron.errors import LayerError
from hetero_megatron.layers.token_ids import check_ids


@pytest.mark.parametrize(("ids", "wrong"), [([3, 96, 150], "96"), ([3, -1], "-1"), ([-100, -7, 5], "-7")])
def test_an_id_outside_the_vocabulary_is_named(ids: list[int], wrong: str) -> None:
    with pytest.raises(LayerError, match=f"token id {wrong} is not in the vocabulary, which has ids 0-95"):
        check_ids("token id", torch.tensor(ids), 96)


def test_good_ids_ignore_and_no_ids_pass() -> None:
    for ids in ([0, 95], [-100, 0, 95], []):
        check_ids("token id", torch.tensor(ids, dtype=torch.int64), 96)
