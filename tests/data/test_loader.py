"""Steps prepared ahead: the same with any number of workers, and workers that end as they should (cases O-53, O-66)."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hetero_megatron.data.document_samples import DocumentSamples
from hetero_megatron.data.lanes import Lane, flop_cost
from hetero_megatron.data.loader import LoadedStep, Loader
from hetero_megatron.data.packing import DocumentPacking, RowPacking
from hetero_megatron.data.piece import Piece
from hetero_megatron.data.rows import PackedRows
from hetero_megatron.data.samples import DataPosition, Samples
from hetero_megatron.data.steps import Steps
from hetero_megatron.data.stream_samples import StreamSamples
from hetero_megatron.errors import DataError
from tests.data.memory import MemoryDocuments, MemoryStream

SIZES = (5, 9, 2, 7, 16, 1, 30, 4, 4, 11)
LANES = (Lane(2, 16, 2.0, 4), Lane(1, 32, 1.0))


def over_documents(
    workers: int,
    position: DataPosition = DataPosition(),  # noqa: B008
    samples: Samples | None = None,
    epochs: float | None = 3.0,
    prefetch: int = 2,
) -> Loader:
    samples = samples or DocumentSamples(MemoryDocuments(SIZES), 0, 16)
    steps = Steps(samples, 3, 16, "documents", epochs)
    packing = DocumentPacking(samples, 16, LANES, flop_cost(1.0, 0.1, LANES))
    return Loader(steps, packing, 0, 4, position, workers, prefetch)


def told(step: LoadedStep) -> tuple[object, ...]:
    batches = [
        (
            batch.tokens_T.tolist(),
            batch.targets_T.tolist(),
            batch.segments.positions_T.tolist(),
            batch.segments.cu_seqlens,
        )
        for batch in step.batches
    ]
    return step.samples, step.position, step.tokens, step.padding, step.report, batches


def all_steps(loader: Loader, most: int = 10**6) -> Iterator[LoadedStep]:
    with loader:
        for _ in range(most):
            step = loader.next()
            if step is None:
                assert loader.next() is None, "it stays over"
                return
            yield step


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def test_any_number_of_workers_makes_the_same_steps() -> None:
    inline = [told(step) for step in all_steps(over_documents(0))]
    assert len(inline) > 5
    assert [samples.iteration for samples, *_ in inline] == list(range(len(inline)))  # type: ignore[attr-defined]
    for workers in (1, 2, 3):
        assert [told(step) for step in all_steps(over_documents(workers))] == inline


def test_rows_are_loaded_as_documents_are() -> None:
    samples = PackedRows(MemoryDocuments(SIZES), 0, 8)
    steps = Steps(samples, 4, 8, "rows", 2.0)
    packing = RowPacking(samples, 4, [(3, 1), (1, 1)])
    inline, worked = (
        [told(step) for step in all_steps(Loader(steps, packing, 0, 3, workers=workers))]
        for workers in (0, 2)
    )
    assert inline == worked
    samples_of_last, position, tokens, padding, report, batches = inline[-1]
    assert (samples_of_last.count, position.sample) == (2, 22)  # type: ignore[attr-defined]
    assert (tokens, padding, report, len(batches)) == (8, 1, None, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [2, 3, 5])
def test_a_stream_goes_on_from_any_step_with_any_number_of_workers(stop: int, workers: int) -> None:
    def loader(position: DataPosition, workers: int) -> Loader:
        samples = StreamSamples(MemoryStream([16] * 24), 7, 16, shuffle_buffer=4)
        lanes = (Lane(1, 32), Lane(1, 32))
        packing = DocumentPacking(samples, 16, lanes, flop_cost(1.0, 0.0, lanes))
        return Loader(Steps(samples, 4, 16, "documents"), packing, 1, 1, position, workers)

    whole = [told(step) for step in all_steps(loader(DataPosition(), 0), 14)]
    first = list(all_steps(loader(DataPosition(), workers), stop))
    rest = list(all_steps(loader(first[-1].position, workers), 14 - stop))
    assert [told(step) for step in first + rest] == whole


def test_tokens_and_padding_are_those_of_the_own_pipeline() -> None:
    for step in all_steps(over_documents(1)):
        sizes = [int(batch.tokens_T.numel()) for batch in step.batches]
        assert all(size % 4 == 0 for size in sizes)
        assert sum(sizes) == step.tokens + step.padding
        assert step.report is not None
        assert 0 <= step.tokens <= step.report.tokens
        assert step.wait_seconds >= 0


class Noting(DocumentSamples):
    """Writes down which steps' samples were read."""

    def __init__(self, path: Path, refuse: int | None = None, fail: int | None = None) -> None:
        super().__init__(MemoryDocuments([16] * 100), 0, 16)
        self.path, self.refuse, self.fail = path, refuse, fail

    def sample(self, number: int) -> tuple[Piece, ...]:
        if number == self.refuse:
            raise DataError("document 5 (five.txt) cannot be read: No such file")
        if number == self.fail:
            raise ZeroDivisionError("a defect")
        with self.path.open("a") as file:
            file.write(f"{number}\n")
        return super().sample(number)

    @property
    def read(self) -> set[int]:
        return set(map(int, self.path.read_text().split())) if self.path.exists() else set()


def loader_of(samples: Samples, workers: int, prefetch: int = 2) -> Loader:
    lanes = (Lane(3, 16),)
    packing = DocumentPacking(samples, 16, lanes, flop_cost(1.0, 0.1, lanes))
    return Loader(Steps(samples, 3, 16, "documents", 1.0), packing, 0, 1, None, workers, prefetch)


def test_workers_prepare_no_more_than_prefetch_steps_ahead(tmp_path: Path) -> None:
    samples = Noting(tmp_path / "read")
    with loader_of(samples, workers=2, prefetch=2) as loader:
        assert until(lambda: len(samples.read) == 12)
        time.sleep(0.1)
        assert samples.read == set(range(12))
        loader.next()
        assert until(lambda: samples.read == {*range(12), 12, 13, 14})
        time.sleep(0.1)
        assert samples.read == set(range(15))


def test_a_workers_refusal_arrives_at_its_step_with_its_text(tmp_path: Path) -> None:
    for workers in (0, 1, 2):
        with loader_of(Noting(tmp_path / "read", refuse=7), workers) as loader:
            assert [loader.next() is not None for _ in range(2)] == [True, True]
            for _ in range(2):
                with pytest.raises(
                    DataError, match=r"^document 5 \(five.txt\) cannot be read: No such file$"
                ):
                    loader.next()


def test_a_defect_in_a_worker_arrives_with_its_traceback(tmp_path: Path) -> None:
    with loader_of(Noting(tmp_path / "read", fail=4), 2) as loader:
        loader.next()
        with pytest.raises(
            DataError,
            match=r"(?s)data worker 1 of pipeline 0 failed while it prepared step 1:.*ZeroDivisionError: a defect",
        ):
            loader.next()


def test_a_killed_worker_is_named(tmp_path: Path) -> None:
    with loader_of(Noting(tmp_path / "read"), 2, prefetch=1) as loader:
        loader.next()
        os.kill(loader.processes[1], signal.SIGKILL)
        assert until(lambda: has_ended(loader.processes[1]))
        with pytest.raises(
            DataError,
            match=r"data worker 1 of pipeline 0 \(process \d+\) was killed by SIGKILL, by someone or by the "
            r"system because memory ran out; it was to prepare step \d",
        ):
            list(iter(loader.next, None))


def test_workers_leave_interrupts_and_terminations_to_the_rank(tmp_path: Path) -> None:
    with loader_of(Noting(tmp_path / "read"), 2) as loader:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            for process in loader.processes:
                os.kill(process, number)
        assert sum(1 for _ in iter(loader.next, None)) == 34


def test_no_process_is_left_behind(tmp_path: Path) -> None:
    for taken in (0, 2, 40):
        with loader_of(Noting(tmp_path / "read"), 3) as loader:
            processes = loader.processes
            for _ in range(taken):
                loader.next()
        assert len(processes) == 3
        for process in processes:
            with pytest.raises(ProcessLookupError):
                os.kill(process, 0)
        loader.close()


def test_workers_end_when_their_rank_is_killed(tmp_path: Path) -> None:
    report, signals = os.pipe()
    rank = os.fork()
    if not rank:
        loader = loader_of(Noting(tmp_path / "read"), 2)
        loader.start()
        os.write(signals, " ".join(map(str, loader.processes)).encode())
        time.sleep(60)
        os._exit(0)
    processes = list(map(int, os.read(report, 100).split()))
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    os.close(report)
    os.close(signals)
    assert len(processes) == 2
    assert until(lambda: all(has_ended(process) for process in processes))


def test_a_loader_that_is_started_after_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(
        DataError, match="cannot be forked once CUDA has started in this process; start the loader"
    ):
        over_documents(1).start()
    assert len(list(all_steps(over_documents(0)))) > 5


def test_a_negative_number_of_workers_is_refused() -> None:
    for workers, prefetch in ((-1, 2), (1, 0)):
        with pytest.raises(
            DataError, match=f"workers {workers} and prefetch {prefetch}: workers are 0 or more"
        ):
            over_documents(workers, prefetch=prefetch)
