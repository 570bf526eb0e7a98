"""Which losses lose state, and who guards whom."""

from hetero_megatron.cluster import Cluster, Device
from hetero_megatron.graph.trace import trace
from hetero_megatron.losses import guardians, stand_ins, survivable
from hetero_megatron.models.llama import Llama
from hetero_megatron.program import Program
from hetero_megatron.strategy import Strategy
from tests.distributed.training import T0, build, stage, strategy

MODEL = Llama(T0)
STAGES = [stage("0", "0"), stage("1", "1-2"), stage("2", "3")]


def two(zero: int) -> Program:
    return build(MODEL, strategy((3, 1, STAGES), (1, 1, [stage("3", "0-3")]), zero=zero))


def test_two_whole_copies_survive_any_single_loss() -> None:
    found = survivable(two(0))
    assert found.singles == ()
    assert found.pairs == ((0, 3), (1, 3), (2, 3))
    assert str(found) == (
        "survival: no loss of a single rank loses anything; 3 of 6 losses of two ranks at once lose nothing "
        "(all but 0 with 3, 1 with 3, 2 with 3)"
    )
    assert guardians(two(0)) == {}


def test_shards_need_guardians_and_then_survive_as_whole_copies_do() -> None:
    program = two(1)
    assert survivable(program).singles == (0, 1, 2, 3)
    assert "the loss of rank 0-3 goes back to the last checkpoint" in str(survivable(program))
    kept = guardians(program)
    assert {rank: kept[rank] for rank in (0, 1, 2)} == {0: 3, 1: 3, 2: 3}
    assert survivable(program, kept).singles == ()


def test_a_guardian_is_on_another_node_where_there_is_one() -> None:
    plan: Strategy = strategy((2, 1, [stage("0-1", "0-3")]), (2, 1, [stage("2-3", "0-3")]), zero=1)
    kinds = Cluster.local_cpu(1).kinds
    cluster = Cluster(tuple(Device(rank, "cpu", rank % 2) for rank in range(4)), kinds)
    kept = guardians(Program.build(trace(MODEL), plan, T0.facts, cluster))
    assert {rank: other % 2 for rank, other in kept.items()} == {0: 1, 1: 0, 2: 1, 3: 0}
    assert sorted(kept.values()) == [0, 1, 2, 3]


def test_a_guardian_stands_in_only_while_it_lives() -> None:
    program = two(1)
    kept = guardians(program)
    assert stand_ins(program, {0}, kept) == {0: 3}
    assert kept[3] == 0
    assert stand_ins(program, {0, 3}, kept) == {}
    assert stand_ins(program, {1, 3}, kept) == {3: 0}
    assert stand_ins(program, {7}, kept) == {}


def test_a_rank_alone_has_nobody_to_guard_it() -> None:
    assert guardians(build(MODEL, strategy((2, 1, [stage("0", "0-3")])))) == {}
    assert str(survivable(build(MODEL, strategy((2, 1, [stage("0", "0-3")]))))) == (
        "survival: the loss of rank 0 goes back to the last checkpoint"
    )
