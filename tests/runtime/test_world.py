"""Processes and their groups: numbered by the strategy, created by all ranks in one order."""

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero_megatron.errors import RuntimeFailure
from hetero_megatron.runtime.launch import Rendezvous, fork_ranks
from hetero_megatron.runtime.world import Groups, World
from tests.distributed.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(("started", "ranks"), [(2, (0, 1, 2)), (2, (0,))])
def test_another_number_of_processes_than_ranks_is_refused(
    started: int, ranks: tuple[int, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    def main(rendezvous: Rendezvous) -> None:
        World.join(rendezvous, ranks, CPU, 20)

    assert fork_ranks(started, main, 20) == 1
    expected = (
        f"error: 2 processes were started, the strategy has {len(ranks)} ranks; start one per rank\n" * 2
    )
    assert capfd.readouterr().err == expected


def test_processes_take_the_ranks_of_the_strategy_in_ascending_order() -> None:
    def main(rendezvous: Rendezvous) -> None:
        world = World.join(rendezvous, (7, 2, 5), CPU, 20)
        assert world.rank == (2, 5, 7)[rendezvous.index]
        assert [world.index(rank) for rank in (7, 5, 2)] == [2, 1, 0]
        assert world.timeout == datetime.timedelta(seconds=20)
        world.leave()

    assert fork_ranks(3, main, 20) == 0


def reduced(groups: Groups, *ranks: int) -> float | None:
    """The sum of the ranks' numbers over their group; None on other ranks."""
    if groups.world.rank not in ranks:
        return None
    number = torch.tensor([float(groups.world.rank)])
    dist.all_reduce(number, group=groups[ranks])
    return number.item()


def test_groups_join_the_ranks_they_name_in_whatever_order() -> None:
    def work(world: World) -> Any:
        groups = Groups(world, [(5, 2), (7, 5), (7, 5, 2), (2,)], [(5, 7)])
        sums = reduced(groups, 5, 2), reduced(groups, 5, 7), reduced(groups, 7, 2, 5)
        whole = groups[7, 5, 2] is dist.group.WORLD and groups.control((2, 5, 7)) is world.control
        return sums, groups.created, whole

    found = run_ranks((2, 5, 7), work, 20)
    assert [sums for sums, _, _ in found.values()] == [
        (7.0, None, 14.0),
        (7.0, 12.0, 14.0),
        (None, 12.0, 14.0),
    ]
    for rank, (_, created, whole) in found.items():
        assert created == ((2, 5), (2, 5, 7), (5, 7)), f"rank {rank} must know all groups of several ranks"
        assert whole, f"rank {rank} made the world twice"


def test_groups_may_be_added_by_ranks_that_are_in_some_of_them_only() -> None:
    """Whoever skipped a group that others made would give the next one another name, and hang."""

    def work(world: World) -> Any:
        groups = Groups(world, [(0, 1)])
        groups.add([(0, 1), (1, 2)])
        groups.add([(0, 1), (1, 2), (0, 2)])
        return reduced(groups, 1, 2), reduced(groups, 0, 2), groups.created

    every = ((0, 1), (0, 2), (1, 2))
    assert run_ranks(range(3), work, 20) == {
        0: (None, 2.0, every),
        1: (3.0, None, every),
        2: (3.0, 2.0, every),
    }


def test_a_missing_group_is_named_together_with_those_there_are() -> None:
    def work(world: World) -> Any:
        groups = Groups(world, [(0, 1)])
        with pytest.raises(RuntimeFailure) as collective:
            groups[2, 0]
        with pytest.raises(RuntimeFailure) as control:
            groups.control((0, 1, 2))
        return str(collective.value), str(control.value)

    found = run_ranks(range(3), work, 20)
    assert found[1] == (
        "rank 1 is in no process group of ranks (0, 2); it is in [(0, 1)]",
        "rank 1 is in no control group of ranks (0, 1, 2); it is in [(0, 1)]",
    )
    assert found[2][0] == "rank 2 is in no process group of ranks (0, 2); it is in []"


def test_groups_wait_as_long_as_their_world() -> None:
    def work(world: World) -> Any:
        groups = Groups(world, [(0, 1)])
        return groups[0, 1]._get_backend(CPU).options._timeout if world.rank < 2 else None

    assert run_ranks(range(3), work, 23)[0] == datetime.timedelta(seconds=23)
