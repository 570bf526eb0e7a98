"""Two processes get what torch.distributed's collectives give, bit by bit, whatever the tensor's size."""

import pytest
import torch
from torch import Tensor

from hetero_megatron.runtime import pair
from hetero_megatron.runtime.exchange import all_reduce
from hetero_megatron.runtime.world import Groups, World
from tests.distributed.ranks import run_ranks


def data(rank: int, rows: int = 6) -> Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(rank))


def test_a_pair_reduces_scatters_and_gathers() -> None:
    def work(world: World) -> list[Tensor]:
        group, mine = Groups(world, [(0, 1)])[(0, 1)], data(world.rank)
        assert pair.suits(group, mine)
        total, part, both = mine.clone(), torch.empty(3, 5), torch.empty(12, 5)
        ends = [
            pair.all_reduce(total, group),
            pair.reduce_scatter(part, mine, group),
            pair.all_gather(both, mine, group),
        ]
        for finish in ends:  # all three were under way at once
            finish()
        return [total, part, both]

    found, first, second = run_ranks((0, 1), work), data(0), data(1)
    for rank, (total, part, both) in found.items():
        assert torch.equal(total, first + second)
        assert torch.equal(part, (first + second)[3 * rank : 3 * rank + 3])
        assert torch.equal(both, torch.cat((first, second)))


@pytest.mark.parametrize(("ranks", "rows"), [((0, 1), 6), ((0, 1), 150_000), ((0, 1, 2), 6)])
def test_sums_and_maxima_of_small_large_and_three_processes_tensors(
    ranks: tuple[int, ...], rows: int
) -> None:
    def work(world: World) -> tuple[bool, Tensor, Tensor, Tensor]:
        group = Groups(world, [ranks])[ranks]
        total, largest, later = (data(world.rank, rows) for _ in range(3))
        all_reduce(total, group)
        all_reduce(largest, group, "max")
        finish = all_reduce(later, group, later=True)
        assert finish is not None
        finish()
        return pair.suits(group, total), total, largest, later

    each = [data(rank, rows) for rank in ranks]
    for small, total, largest, later in run_ranks(ranks, work).values():
        assert small == (len(ranks) == 2 and rows == 6)
        torch.testing.assert_close(total, torch.stack(each).sum(0))
        assert torch.equal(largest, torch.stack(each).amax(0))
        assert torch.equal(later, total)
