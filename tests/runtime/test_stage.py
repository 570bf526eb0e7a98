"""Generated code of a stage, its passes over micro-batches, and the Reshards inside it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_megatron.annotation import Annotation, DeviceGroup, DistributedStates
from hetero_megatron.comm import resolve
from hetero_megatron.models.llama import build_single_device
from hetero_megatron.runtime.stage import Reshards, ShapedExchange, StageRun, full_shape, generate, is_kept
from hetero_megatron.runtime.world import Groups, World
from tests.distributed.ranks import run_ranks
from tests.distributed.training import T0, Llama, build, het4, micro_batch, sequences, stage, strategy


def union(*subgroups: tuple[tuple[int, ...], dict[int, int]], hdim: int = 0) -> Annotation:
    groups, states = zip(*subgroups, strict=True)
    return Annotation(tuple(map(DeviceGroup, groups)), tuple(map(DistributedStates.of, states)), hdim)


@pytest.mark.parametrize(
    ("annotation", "rank", "local", "full"),
    [
        (Annotation.on((0,)), 0, (7, 5), (7, 5)),
        (Annotation.on((0, 1), {-1: 2}), 1, (7, 5), (7, 5)),
        (Annotation.on((0, 1), {0: 2}), 1, (7, 5), (14, 5)),
        (Annotation.on((0, 1), {1: 2}), 0, (7, 5), (7, 10)),
        (Annotation.on((0, 1, 2, 3), {0: 2, 1: 2}), 3, (7, 5), (14, 10)),
        # Two pipelines share one annotation, and each counts as many tokens as if both had its own.
        (union(((0, 1), {0: 2}), ((2,), {})), 1, (7, 5), (28, 5)),
        (union(((0, 1), {0: 2}), ((2,), {})), 2, (16, 5), (32, 5)),
        (union(((0, 1), {-1: 2}), ((2,), {}), ((3,), {})), 0, (7, 5), (21, 5)),
    ],
    ids=str,
)
def test_the_full_shape_follows_from_any_rank_s_local_one(
    annotation: Annotation, rank: int, local: tuple[int, ...], full: tuple[int, ...]
) -> None:
    assert full_shape(annotation, rank, local) == full
    bounds = annotation.region(rank).bounds(full)
    assert tuple(hi - lo for lo, hi in bounds) == local, "and back again"


def test_two_stages_run_by_hand_are_the_whole_model() -> None:
    model = build_single_device(T0, 7)
    program = build(model, strategy((2, 1, [stage("0", "0-1"), stage("1", "2-3")])))
    modules = dict(model.named_modules())
    runs = []
    for rank in (0, 1):
        (chunk,) = program.executable(rank).chunks
        sources = [program.annotated.graph.node(name).inputs[0] for name in chunk.outputs]
        code, inputs = generate(chunk.nodes, chunk.inputs, sources, modules, {})
        runs.append(StageRun(code, inputs, ends=not chunk.outputs))
    first, last = runs
    assert first.inputs == ("tokens", "segments")
    assert last.inputs[0] == "layers.2.entry"
    assert set(last.inputs[1:]) == {"targets", "segments"}

    batches = [micro_batch([document]) for document in sequences(2)]
    # Both are in flight at once, and the second comes back first.
    sent = [first.forward(number, batch, {})[0] for number, batch in enumerate(batches)]
    assert first.in_flight == 2
    losses = [
        last.forward(number, batch, {"layers.2.entry": sent[number].clone()})[0]
        for number, batch in enumerate(batches)
    ]
    for number in (1, 0):
        (gradient,) = last.backward(number, [])
        assert first.backward(number, [gradient]) == ()
    assert first.in_flight == last.in_flight == 0

    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    wanted = [model(batch.tokens_T, batch.targets_T, batch.segments) for batch in batches]
    torch.stack(wanted).sum().backward()
    assert [loss.item() for loss in losses] == [loss.item() for loss in wanted]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=lambda m, n=name: f"{n}: {m}")


class UsesOne(torch.fx.GraphModule):
    """y = 3 a, b is not needed."""

    def __init__(self) -> None:
        graph = torch.fx.Graph()
        a, _ = graph.placeholder("a"), graph.placeholder("b")
        graph.output((graph.call_function(torch.mul, (a, 3.0)),))
        super().__init__({}, graph)


def test_what_a_stage_received_in_vain_gets_a_zero_gradient() -> None:
    run = StageRun(UsesOne(), ("a", "b"), ends=False)
    (output,) = run.forward(0, micro_batch(sequences(1)), {"a": torch.ones(2), "b": torch.ones(3)})
    assert not output.requires_grad, "what is sent keeps no graph alive"
    a, b = run.backward(0, [torch.tensor([1.0, 2.0])])
    assert a.tolist() == [3.0, 6.0]
    assert b.tolist() == [0.0, 0.0, 0.0]


def test_a_rank_that_keeps_its_shard_does_nothing_and_copies_nothing() -> None:
    """A TP1 pipeline beside a TP2 one stands in all its plans, with a copy of the whole activation."""
    program = build(Llama(T0), het4())
    executable = program.executable(3)
    assert any("Identity" in bound.forward.operators for bound in executable.reshards if bound.forward)
    reshards = Reshards(3, None)  # type: ignore[arg-type]  # no group is asked for
    for bound in executable.reshards:
        for plan in (bound.forward, bound.backward):
            assert plan is None or is_kept(plan, 3), bound.name
        assert reshards.bind(bound.forward, bound.backward) is None
    gather = next(each for each in program.executable(0).reshards if each.name == "layers.0.attention_in")
    assert gather.forward is not None
    assert not is_kept(gather.forward, 0)


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        (Annotation.on((0, 1), {-1: 2}), Annotation.on((0, 1), {-1: 2}), True),
        (Annotation.on((0, 1), {-1: 2}), Annotation.on((0, 1), {0: 2}), False),
        (Annotation.on((0, 1), {-2: 2}), Annotation.on((0, 1), {-1: 2}), False),
        (union(((0,), {}), ((1, 2), {-2: 2})), union(((0,), {}), ((1, 2), {-1: 2})), True),
        (union(((0,), {}), ((1, 2), {0: 2})), union(((0,), {}), ((1, 2), {-1: 2})), True),
        (union(((0, 1), {0: 2}), ((2,), {})), union(((0, 1), {-1: 2}), ((2,), {})), False),
    ],
    ids=str,
)
def test_a_shard_is_kept_when_neither_its_region_nor_its_sum_changes(
    before: Annotation, after: Annotation, kept: bool
) -> None:
    assert is_kept(resolve(before, after), 0) is kept


def test_layers_with_one_plan_share_what_is_compiled_for_it_and_keep_the_latest_shapes() -> None:
    program = build(Llama(T0), strategy((1, 1, [stage("0-1", "0-3")])))
    bound = [each for each in program.executable(0).reshards if each.name.endswith("attention_in")]
    assert len(bound) == 4

    def work(world: World) -> Any:
        groups = Groups(world, program.groups)
        reshards = Reshards(world.rank, groups)
        exchanges = [reshards.bind(each.forward, each.backward) for each in bound]
        shaped: ShapedExchange = reshards._shaped(bound[0].forward)  # type: ignore[assignment]
        made = []
        for tokens in (2, 3, 2):
            for exchange in exchanges:
                assert exchange is not None
                shard = torch.full((tokens, 32), float(world.rank), requires_grad=True)
                whole = exchange(shard)
                whole.sum().backward()
                made.append((tuple(whole.shape), shard.grad.unique().tolist()))  # type: ignore[union-attr]
        return made, len(reshards._by_plan), tuple(shaped._exchange.cache_info())

    for made, plans, cache in run_ranks((0, 1), work, 30).values():
        # Tokens are gathered, and their gradients summed on the way back.
        assert made == [((2 * tokens, 32), [2.0]) for tokens in (2, 3, 2) for _ in range(4)]
        assert plans == 2, "one plan forward and one back for all layers"
        assert cache == (10, 2, 256, 2), "hits, misses, most, now"


def test_an_all_reduce_inside_a_stage_needs_no_second_buffer() -> None:
    program = build(Llama(T0), strategy((1, 1, [stage("0-1", "0-3")]), sequence_parallel=False))
    bound = next(each for each in program.executable(0).reshards if each.name == "layers.0.attention_out")

    def work(world: World) -> Any:
        exchange = Reshards(world.rank, Groups(world, program.groups)).bind(bound.forward, bound.backward)
        assert exchange is not None
        weight = torch.ones(3, 4, requires_grad=True)
        shard: Tensor = weight * (world.rank + 1.0)
        place = shard.data_ptr()
        result = exchange(shard)
        result.sum().backward()
        return result.data_ptr() == place, result[0, 0].item(), weight.grad[0, 0].item()  # type: ignore[index]

    assert run_ranks((0, 1), work, 30) == {0: (True, 3.0, 1.0), 1: (True, 3.0, 2.0)}
