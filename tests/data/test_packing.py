"""A step's samples as micro-batches (cases O-39, O-50, O-52: who takes what never changes what is taken)."""

import pytest

from hetero_megatron.data.dispatch import deal_tail
from hetero_megatron.data.document_samples import DocumentSamples
from hetero_megatron.data.lanes import Lane, flop_cost
from hetero_megatron.data.packing import DocumentPacking, Packing, RowPacking, check_last_step, prepare
from hetero_megatron.data.rows import PackedRows
from hetero_megatron.data.samples import DataPosition
from hetero_megatron.data.steps import Steps, StepSamples
from hetero_megatron.data.stream_samples import StreamSamples
from hetero_megatron.errors import DataError
from hetero_megatron.runtime.batch import IGNORE
from tests.data.memory import MemoryDocuments, MemoryStream


def numbers(packing: Packing, step: StepSamples) -> list[list[list[int]]]:
    return [[[unit[0] for unit in batch] for batch in own] for own in packing.share(step).pipelines]


def rows(count: int = 24) -> PackedRows:
    return PackedRows(MemoryDocuments([16] * count), 3, 16)


def test_rows_are_dealt_in_order() -> None:
    packing = RowPacking(rows(), 8, [(3, 2), (1, 2)])
    assert numbers(packing, StepSamples(2, 16, 8)) == [[[16, 17], [18, 19], [20, 21]], [[22, 23]]]


def test_a_short_last_step_leaves_micro_batches_and_pipelines_out() -> None:
    packing = RowPacking(rows(), 6, [(2, 2), (1, 2)])
    assert numbers(packing, StepSamples(0, 6, 4)) == [[[6, 7], [8]], [[9]]]
    assert numbers(packing, StepSamples(0, 6, 2)) == [[[6]], [[7]]]
    assert numbers(packing, StepSamples(0, 6, 1)) == [[[6]], []]
    assert prepare(packing, packing.share(StepSamples(0, 6, 1)), 1, 1) == []
    assert deal_tail(2, [(0, 1), (3, 1)]) == ((), ((0,), (1,)))


def test_a_short_last_step_is_refused_where_the_schedule_is_for_all_micro_batches() -> None:
    with pytest.raises(
        DataError, match="the last step has 3 rows for 4 micro-batches, and the schedule of a file"
    ):
        check_last_step(Steps(rows(11), 8, 16, "rows", 1.0), [(3, 2), (1, 2)])
    check_last_step(Steps(rows(11), 8, 16, "rows", 1.0, "drop"), [(3, 2), (1, 2)])
    check_last_step(Steps(rows(12), 8, 16, "rows", 1.0), [(3, 2), (1, 2)])
    check_last_step(Steps(rows(11), 8, 16, "rows"), [(3, 2), (1, 2)])


@pytest.mark.parametrize(
    "pipelines", [[(6, 1)], [(3, 1), (3, 1)], [(2, 1), (2, 1), (2, 1)], [(4, 1), (2, 1)]]
)
def test_step_three_has_samples_12_to_17_on_any_number_of_pipelines(pipelines: list[tuple[int, int]]) -> None:
    samples = rows()
    steps = Steps(samples, 6, 16, "rows")
    step = steps.at(DataPosition(2, 12))
    assert step is not None
    packing = RowPacking(samples, 6, pipelines)
    assert [each for own in numbers(packing, step) for batch in own for each in batch] == list(range(12, 18))
    seen = [
        int(piece.tokens_T[0]) // 1000
        for first in (0, 6, 12, 18)
        for batch in sum(packing.share(StepSamples(0, first, 6)).pipelines, ())
        for number, _ in batch
        for piece in samples.sample(number)
    ]
    assert sorted(seen) == list(range(24)), "one pass has every document once"


def test_the_targets_of_packed_documents_are_those_of_documents_alone() -> None:
    samples = DocumentSamples(MemoryDocuments([3, 2, 4]), 0, 16)
    packing = DocumentPacking(samples, 16, [Lane(1, 20, multiple=10)], flop_cost(1.0, 0.0, [Lane(1, 20)]))
    (batch,) = prepare(packing, packing.share(StepSamples(0, 0, 3)), 0, 10)
    assert len(batch.tokens_T) == 10
    assert batch.padding == 1
    assert sorted(batch.lengths[:-1]) == [2, 3, 4]
    made = batch.on("cpu")
    assert made.valid_tokens == 6
    end = 0
    for length in batch.lengths[:-1]:
        own = made.tokens_T[end : end + length].tolist()
        assert made.targets_T[end : end + length].tolist() == [*own[1:], IGNORE]
        assert made.segments.positions_T[end : end + length].tolist() == list(range(length))
        end += length


def test_only_the_documents_of_the_own_pipeline_are_read() -> None:
    documents = MemoryDocuments([10, 20, 16, 7, 3, 12, 5, 9])
    lanes = [Lane(2, 32), Lane(2, 32)]
    packing = DocumentPacking(DocumentSamples(documents, 0, 32), 32, lanes, flop_cost(1.0, 0.1, lanes))
    share = packing.share(StepSamples(0, 0, 8))
    assert documents.reads == []
    prepare(packing, share, 0, 1)
    first = set(documents.reads)
    documents.reads.clear()
    prepare(packing, share, 1, 1)
    assert not first & set(documents.reads)
    assert first | set(documents.reads) == set(range(8))


def test_long_documents_of_a_stream_are_dispatched_in_pieces() -> None:
    samples = StreamSamples(MemoryStream([37, 3]), 0, 16, shuffle_buffer=1)
    lanes = [Lane(2, 16), Lane(2, 16)]
    packing = DocumentPacking(samples, 16, lanes, flop_cost(1.0, 0.0, lanes))
    share = packing.share(StepSamples(0, 0, 2))
    units = sorted(unit for own in share.pipelines for batch in own for unit in batch)
    assert units == [(0, 0), (0, 1), (0, 2), (1, 0)]
    lengths = [batch.lengths for number in range(2) for batch in prepare(packing, share, number, 1)]
    assert sorted(lengths) == [(3,), (5,), (16,), (16,)]


def test_a_context_that_no_micro_batch_holds_is_refused_before_the_first_step() -> None:
    lanes = [Lane(2, 8)]
    with pytest.raises(
        DataError, match=r"a document of seq_length tokens has 16 tokens and fits into no micro-batch"
    ):
        DocumentPacking(DocumentSamples(MemoryDocuments([3]), 0, 16), 16, lanes, flop_cost(1.0, 0.0, lanes))
