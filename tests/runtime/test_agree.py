"""Ranks of one pipeline compare what they are about to run, and stop together when it differs."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hetero_megatron.errors import RuntimeFailure
from hetero_megatron.runtime.agree import agree_on_kernels, agree_on_micro_batches
from hetero_megatron.runtime.batch import MicroBatch, Segments
from hetero_megatron.runtime.world import Groups, World
from tests.distributed.ranks import run_ranks
from tests.distributed.training import T0, Llama, build, het4

PROGRAM = build(Llama(T0), het4())


def batches(*documents: Sequence[int]) -> list[MicroBatch]:
    """Micro-batches of documents of these lengths."""
    made = []
    for lengths in documents:
        ids = torch.zeros(sum(lengths), dtype=torch.int64)
        made.append(MicroBatch(ids, ids, Segments.of_lengths(tuple(lengths))))
    return made


def told(by_rank: Callable[[int], list[MicroBatch]]) -> dict[int, str]:
    """What each rank of HET4 raises when it passes `by_rank(rank)`; "" when it goes on."""

    def work(world: World) -> Any:
        groups = Groups(world, PROGRAM.groups, PROGRAM.control_groups)
        try:
            agree_on_micro_batches(PROGRAM, world, groups, by_rank(world.rank))
        except RuntimeFailure as error:
            return str(error)
        return ""

    return run_ranks(PROGRAM.strategy.ranks, work, 20)


def test_equal_micro_batches_pass_and_pipelines_may_differ() -> None:
    assert set(told(lambda rank: batches([4], [4]) if rank == 3 else batches([3, 5], [8], [2])).values()) == {
        ""
    }


@pytest.mark.parametrize(
    ("other", "what", "numbers"),
    [
        (batches([8], [8]), "micro-batches", ("3", "2")),
        (batches([8], [8], [8], [8]), "micro-batches", ("3", "4")),
        ([], "micro-batches", ("3", "0")),
        (batches([8], [8], [6]), "tokens", ("24", "22")),
    ],
    ids=["one less", "one more", "none", "a shorter one"],
)
def test_another_count_or_size_is_told_on_every_rank_of_the_pipeline(
    other: list[MicroBatch], what: str, numbers: tuple[str, str]
) -> None:
    found = told(lambda rank: other if rank == 2 else batches([8], [8], [8]))
    message = (
        f"pipeline 0 disagrees on {what}: stage 0 (rank 0) has {numbers[0]}, "
        f"stage 1 (rank 2) has {numbers[1]}; nothing was sent"
    )
    assert found == {0: message, 1: message, 2: message, 3: ""}


@pytest.mark.parametrize(
    "other", [batches([8], [6], [10]), batches([8], [4, 4], [8])], ids=["sizes", "borders"]
)
def test_the_same_tokens_cut_in_another_way_are_told_too(other: list[MicroBatch]) -> None:
    found = told(lambda rank: other if rank == 1 else batches([8], [8], [8]))
    assert found[0] == found[1] == found[2]
    assert found[0].startswith("pipeline 0 disagrees on document borders (checksum): stage 0 (rank 0) has ")
    assert "stage 0 (rank 1) has " in found[0], "two ranks of one stage are told apart"


def test_a_pipeline_of_one_rank_asks_nobody() -> None:
    world = World(3, (0, 1, 2, 3), torch.device("cpu"), None, None)  # type: ignore[arg-type]
    agree_on_micro_batches(PROGRAM, world, None, batches([4]))  # type: ignore[arg-type]


@pytest.mark.parametrize("other", ["apex", "torch"])
def test_a_rank_with_another_kernel_is_told_on_every_rank(other: str) -> None:
    def work(world: World) -> str:
        try:
            agree_on_kernels(
                world, {"attention": "torch-sdpa", "adam": other if world.rank == 5 else "torch"}
            )
        except RuntimeFailure as error:
            return str(error)
        return ""

    told_of = "" if other == "torch" else (
        "kernels.adam: rank 2 has chosen torch, rank 5 has chosen apex; install the same libraries on all "
        "machines, or name one kernel in the recipe"
    )  # fmt: skip
    assert run_ranks((2, 3, 5), work, 20) == dict.fromkeys((2, 3, 5), told_of)


def test_a_run_of_one_rank_has_no_kernels_to_compare() -> None:
    agree_on_kernels(World(3, (3,), torch.device("cpu"), None, None), {"adam": "torch"})  # type: ignore[arg-type]
