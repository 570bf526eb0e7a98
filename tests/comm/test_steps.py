"""CommPlan: what one rank does, what it sends, how it prints."""

from hetero_megatron.annotation import FULL, Annotation
from hetero_megatron.comm import Collective, Copy, Transfer, resolve


def plan(src: dict[int, int], dst: dict[int, int]):  # type: ignore[no-untyped-def]  # one line of test sugar
    return resolve(Annotation.on((0, 1, 2), src), Annotation.on((0, 1, 2), dst))


def test_a_rank_sees_only_its_own_steps_stage_by_stage() -> None:
    moved = resolve(Annotation.on((0, 1), {-2: 2}), Annotation.on((2, 3), {0: 2}))
    assert moved.ranks == (0, 1, 2, 3)
    reduce, send = moved.for_rank(1)
    assert reduce.steps == (Collective("reduce_scatter", (0, 1), FULL, 0),)
    assert send.steps == (Transfer(1, 3, FULL.cut(0, 1, 2)),)
    assert [stage.steps for stage in moved.for_rank(2)] == [(), (Transfer(0, 2, FULL.cut(0, 0, 2)),)]
    assert [stage.steps for stage in moved.for_rank(9)] == [(), ()]


def test_bytes_sent_count_rings_and_transfers_with_unequal_shards() -> None:
    shape = (7, 2)
    assert plan({-2: 3}, {-1: 3}).bytes_sent(shape, 4) == {0: 76, 1: 76, 2: 76}
    assert plan({-2: 3}, {0: 3}).bytes_sent(shape, 4) == {0: 32, 1: 40, 2: 40}
    assert plan({0: 3}, {-1: 3}).bytes_sent(shape, 4) == {0: 48, 1: 32, 2: 32}
    assert plan({-1: 3}, {0: 3}).bytes_sent(shape, 4) == {0: 0, 1: 0, 2: 0}
    moved = resolve(Annotation.on((0,)), Annotation.on((1,)))
    assert moved.bytes_sent(shape, 4) == {0: 56, 1: 0}


def test_every_step_names_its_ranks_and_pieces() -> None:
    gather = Collective("all_gather", (4, 2), FULL, 1)
    assert (Copy(3, FULL).ranks, Transfer(1, 2, FULL).ranks) == ((3,), (1, 2))
    assert gather.piece(2) == FULL.cut(1, 1, 2)
    assert Collective("all_reduce", (4, 2), FULL).piece(2) == FULL


def test_a_plan_prints_its_stages() -> None:
    text = str(resolve(Annotation.on((0, 1), {-2: 2}), Annotation.on((1, 2), {0: 2})))
    assert text.splitlines() == [
        "RS+SR: (0, 1){partial: 2} -> (1, 2){0: 2}",
        "  stage 0",
        "    reduce_scatter (0, 1) [whole] along dim 0",
        "  stage 1",
        "    transfer 0 -> 1 [dim 0: 0..1/2]",
        "    transfer 1 -> 2 [dim 0: 1/2..1]",
    ]
    assert "in place" in str(plan({-2: 3}, {-1: 3}))
    assert "copy 0 [dim 0: 0..1/3]" in str(plan({-1: 3}, {0: 3}))
