"""Files that `datasets` streams, over several pipelines (case O-51)."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hetero_megatron.data.lanes import Lane, flop_cost
from hetero_megatron.data.loader import Loader
from hetero_megatron.data.packing import DocumentPacking
from hetero_megatron.data.steps import Steps
from hetero_megatron.data.stream_samples import StreamSamples


class Streamed:
    """Texts that `datasets` streams from files, as bytes."""

    def __init__(self, files: Sequence[Path]) -> None:
        import datasets

        names = [str(file) for file in files]
        self.rows = datasets.load_dataset("json", data_files=names, split="train", streaming=True)

    def read(self, epoch: int, first: int) -> Iterator[NDArray[np.int64]]:
        for row in self.rows.skip(first):
            yield np.array(row["ids"])


@pytest.mark.parametrize(
    ("rows", "pipelines"), [((3, 1, 5, 2, 4, 1, 2), 2), ((3, 1, 5, 2, 4, 1, 2), 3), ((9,), 4)]
)
def test_streamed_files_of_unequal_length_give_every_pipeline_the_same_steps(
    rows: Sequence[int], pipelines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    files, number = [], 0
    for index, count in enumerate(rows):
        files.append(tmp_path / f"{index}.jsonl")
        lines = [json.dumps({"ids": [each + 1] * (2 + each % 5)}) for each in range(number, number + count)]
        files[-1].write_text("\n".join(lines) + "\n")
        number += count
    lanes = [Lane(1, 16)] * pipelines
    seen: list[int] = []
    counts = set()
    for pipeline in range(pipelines):
        samples = StreamSamples(Streamed(files), 3, 8, shuffle_buffer=4)
        packing = DocumentPacking(samples, 8, lanes, flop_cost(1.0, 0.0, lanes))
        steps = Steps(samples, 2, 8, "documents", epochs=2.0)
        with Loader(steps, packing, pipeline, workers=0) as loader:
            own = list(iter(loader.next, None))
        counts.add(len(own))
        for batch in (batch for step in own for batch in step.batches):
            seen += [int(batch.tokens_T[end]) for end in batch.segments.cu_seqlens[:-1]]
    assert len(counts) == 1
    assert sorted(seen) == sorted([*range(1, number + 1)] * 2)
