"""Which rank sends which kv heads to whom, for equal and unequal tensor parallelism and with copies."""

from collections.abc import Callable, Sequence

from torch import Tensor

from hetero_megatron.runtime.context_group import ContextGroup, Messages, Route, routes


class Silent:
    """A channel that nobody uses."""

    def exchange(self, sends: Messages, receives: Messages, tag: int) -> Callable[[], None]:
        raise AssertionError

    def all_to_all(self, pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        raise AssertionError


def test_equal_tp_is_one_message_between_ranks_of_the_same_place() -> None:
    parts = [[(0, (0, 8)), (1, (8, 16))], [(2, (0, 8)), (3, (8, 16))]]
    assert set(routes(parts)) == {
        Route(0, 2, (0, 8)),
        Route(1, 3, (8, 16)),
        Route(2, 0, (0, 8)),
        Route(3, 1, (8, 16)),
    }


def test_unequal_tp_sends_each_receiver_the_heads_it_works_with() -> None:
    parts = [[(5, (0, 8)), (1, (8, 16))], [(2, (0, 16))]]
    assert set(routes(parts)) == {
        Route(2, 5, (0, 8)),
        Route(2, 1, (8, 16)),
        Route(5, 2, (0, 8)),
        Route(1, 2, (8, 16)),
    }
    group = ContextGroup.of("ring", 1, parts, Silent())
    assert (group.part, group.sends, group.receives) == (0, ((), ((2, (0, 8)),)), ((), ((2, (0, 8)),)))
    group = ContextGroup.of("ring", 2, parts, Silent())
    assert (group.part, group.sends[0]) == (1, ((5, (0, 8)), (1, (8, 16))))
    assert group.receives[0] == ((5, (0, 8)), (1, (8, 16))), "in the order of columns"


def test_receivers_take_turns_at_copies_and_use_one_of_them_each() -> None:
    copies = [(0, (0, 8)), (1, (0, 8)), (2, (8, 16)), (3, (8, 16))]
    same = [(rank + 4, columns) for rank, columns in copies]
    ahead = [route for route in routes([copies, same]) if route.src < 4]
    assert ahead == [
        Route(0, 4, (0, 8)),
        Route(1, 5, (0, 8)),
        Route(2, 6, (8, 16)),
        Route(3, 7, (8, 16)),
    ]
    narrow = [(4, (0, 8)), (5, (8, 16))]
    found = routes([copies, narrow])
    assert [route for route in found if route.dst > 3] == [Route(0, 4, (0, 8)), Route(3, 5, (8, 16))]
    assert [route for route in found if route.src == 4] == [Route(4, 0, (0, 8)), Route(4, 1, (0, 8))]
