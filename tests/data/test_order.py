"""The order of documents: a function of seed and pass."""

import pytest

from hetero_megatron.data.order import document_at, epoch_order
from hetero_megatron.errors import DataError


def test_a_pass_visits_every_document_once() -> None:
    for epoch in range(3):
        assert sorted(epoch_order(50, 7, epoch).tolist()) == list(range(50))


def test_passes_and_seeds_differ_and_repeat_exactly() -> None:
    orders = {
        tuple(epoch_order(50, seed, epoch).tolist()) for seed in (0, 1, 2**32, 2**40) for epoch in range(3)
    }
    assert len(orders) == 12
    assert epoch_order(50, 1, 2).tolist() == epoch_order(50, 1, 2).tolist()


def test_the_order_never_changes_between_versions() -> None:
    assert epoch_order(6, 1234, 0).tolist() == [1, 5, 0, 2, 3, 4]


def test_the_endless_stream_counts_on_across_passes() -> None:
    stream = [document_at(5, 3, index) for index in range(10)]
    assert stream == [*epoch_order(5, 3, 0).tolist(), *epoch_order(5, 3, 1).tolist()]


def test_no_document_is_refused() -> None:
    with pytest.raises(DataError, match="no document to put in order"):
        document_at(0, 0, 0)


def test_a_negative_seed_or_pass_is_refused() -> None:
    with pytest.raises(DataError, match="seed -1 and epoch 0 must not be negative"):
        epoch_order(5, -1, 0)
