"""Which samples each step takes, and when the epochs are over (cases O-50, O-54)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_megatron.data import steps as steps_file
from hetero_megatron.data.document_samples import DocumentSamples
from hetero_megatron.data.rows import PackedRows
from hetero_megatron.data.samples import DataPosition
from hetero_megatron.data.steps import PackingKind, Steps, StepSamples
from hetero_megatron.data.stream_samples import StreamSamples
from hetero_megatron.errors import DataError
from tests.data.memory import MemoryDocuments, MemoryStream, spelled


def taken(steps: Steps, position: DataPosition = DataPosition(), most: int = 10**6) -> list[range]:  # noqa: B008
    found = []
    while len(found) < most and (step := steps.at(position)) is not None:
        assert step.iteration == position.iteration
        found.append(step.numbers)
        position = steps.after(step)
    return found


def rows(count: int = 8, seq_length: int = 16) -> PackedRows:
    return PackedRows(MemoryDocuments([seq_length] * count), 3, seq_length)


def test_a_step_takes_the_next_rows_without_end() -> None:
    steps = Steps(rows(), 3, 16, "rows")
    assert taken(steps, most=3) == [range(0, 3), range(3, 6), range(6, 9)]
    assert steps.at(DataPosition(7, 100)) == StepSamples(7, 100, 3)


def test_two_and_a_half_passes_of_eight_samples_are_ten_steps_of_two() -> None:
    for packing in ("rows", "documents"):
        samples = rows() if packing == "rows" else DocumentSamples(MemoryDocuments([16] * 8), 3, 16)
        steps = Steps(samples, 2, 16, packing, epochs=2.5)
        assert steps.count() == 10
        assert [number for step in taken(steps) for number in step] == list(range(20))


def test_passes_differ_in_order_and_survive_a_stop_inside_the_second() -> None:
    def texts(position: DataPosition, most: int) -> list[list[int]]:
        samples = rows()
        steps = Steps(samples, 2, 16, "rows")
        numbers = [number for step in taken(steps, position, most) for number in step]
        return [token for number in numbers for token in spelled(samples.sample(number))]

    whole = texts(DataPosition(), 11)
    assert texts(DataPosition(), 6) + texts(DataPosition(6, 12), 5) == whole
    first, second, third = whole[:8], whole[8:16], whole[16:]
    assert first != second
    assert third not in (first[:6], second[:6])
    assert sorted(first) == sorted(second)


@pytest.mark.parametrize("packing", ["rows", "documents"])
def test_the_tail_of_five_samples_is_kept_or_dropped(packing: PackingKind) -> None:
    samples = rows(5) if packing == "rows" else DocumentSamples(MemoryDocuments([16] * 5), 3, 16)
    keep, drop = (Steps(samples, 4, 16, packing, 1.0, last) for last in ("keep", "drop"))  # type: ignore[arg-type]
    assert taken(keep) == [range(0, 4), range(4, 5)]
    assert taken(drop) == [range(0, 4)]
    assert (keep.count(), drop.count()) == (2, 1)
    full = Steps(samples, 5, 16, packing, 2.0, "drop")
    assert taken(full) == [range(0, 5), range(5, 10)]
    assert full.count() == 2


def test_a_step_takes_as_many_documents_as_fit_and_at_least_one() -> None:
    samples = DocumentSamples(MemoryDocuments([5, 9, 2, 7, 16, 1]), 0, 16)
    steps = Steps(samples, 1, 16, "documents")
    for step in taken(steps, most=20):
        assert samples.lengths(step.start, len(step)).sum() <= 16
        assert samples.lengths(step.start, len(step) + 1).sum() > 16
    long = StreamSamples(MemoryStream([100, 3, 3]), 0, 16)
    assert len(taken(Steps(long, 1, 16, "documents"), most=1)) == 1


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 16), min_size=1, max_size=12),
    global_batch_size=st.integers(1, 5),
    epochs=st.sampled_from([0.5, 1.0, 2.25, 3.0]),
    window=st.sampled_from([1, 3, 1 << 16]),
    last_batch=st.sampled_from(["keep", "drop"]),
)
def test_windows_change_nothing_and_every_sample_comes_once(
    sizes: list[int], global_batch_size: int, epochs: float, window: int, last_batch: str
) -> None:
    samples = DocumentSamples(MemoryDocuments(sizes), 1, 16)
    total, budget = max(1, round(epochs * len(sizes))), 16 * global_batch_size
    lengths = samples.lengths(0, total).tolist()
    wanted, first = [], 0
    while first < total:
        count = int(np.searchsorted(np.cumsum(lengths[first:]), budget, side="right"))
        if first + count == total and last_batch == "drop" and sum(lengths[first:]) < budget:
            break
        wanted.append(range(first, first + count))
        first += count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps_file, "WINDOW", window)
        if not wanted:
            with pytest.raises(DataError, match="less than one step"):
                Steps(samples, global_batch_size, 16, "documents", epochs, "drop")
            return
        steps = Steps(samples, global_batch_size, 16, "documents", epochs, last_batch)  # type: ignore[arg-type]
        assert taken(steps) == wanted
        assert steps.count() == len(wanted)
        for number in reversed(range(len(wanted))):
            assert steps.at(DataPosition(number, wanted[number].start)) == StepSamples(
                number, wanted[number].start, len(wanted[number])
            )


def test_millions_of_documents_are_counted_at_once() -> None:
    sizes = np.random.RandomState(0).randint(1, 500, 1_000_000)
    steps = Steps(DocumentSamples(MemoryDocuments(sizes), 0, 512), 512, 512, "documents", 1.0)
    assert abs(steps.count() - sizes.sum() / (512 * 512)) < 3


def test_the_steps_of_an_epoch_of_a_stream_end_but_cannot_be_counted() -> None:
    steps = Steps(StreamSamples(MemoryStream([16] * 5), 0, 16), 2, 16, "documents", 2.0)
    assert [len(step) for step in taken(steps)] == [2, 2, 2, 2, 2]
    with pytest.raises(DataError, match="an epoch of a stream takes is not known before it was read"):
        steps.count()


def test_rows_of_a_stream_are_refused_with_the_remedy() -> None:
    with pytest.raises(DataError, match="packing: rows needs documents .* use packing: documents"):
        Steps(StreamSamples(MemoryStream([16]), 0, 16), 2, 16, "rows")


def test_without_epochs_there_is_no_count() -> None:
    with pytest.raises(DataError, match="without train_epochs there is no last step; give train_iters"):
        Steps(rows(), 2, 16, "rows").count()


def test_epochs_that_are_not_positive_are_refused() -> None:
    with pytest.raises(DataError, match="train_epochs is 0; it must be positive"):
        Steps(rows(), 2, 16, "rows", epochs=0.0)


def test_sizes_that_are_not_positive_are_refused() -> None:
    with pytest.raises(DataError, match="global_batch_size 0 and seq_length 16 must be positive"):
        Steps(rows(), 0, 16, "rows")


def test_dropping_the_only_step_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"1 epochs are 8 samples, less than one step; .* make global_batch_size smaller"
    ):
        Steps(rows(), 9, 16, "rows", 1.0, "drop")
