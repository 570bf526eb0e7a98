"""Layouts of one pipeline: what memory allows, what is of use, where its layers are."""

import pytest

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import PlannerError
from hetero_megatron.models.presets import LLAMA_32B, LLAMA_TINY
from hetero_megatron.planner.layouts import Layout, Layouts, composition_text
from hetero_megatron.planner.small_batches import LAYER_SECONDS, SmallBatchCosts


def layouts(context: int = 32768) -> Layouts:
    return Layouts(SmallBatchCosts(LLAMA_32B, Cluster.of_nodes({"h20": 4}), None, context, "bf16"), context)


def test_a_capacity_fits_and_a_little_more_does_not() -> None:
    found = layouts()
    for layout in (Layout(4, 1, 1), Layout(8, 1, 1, "selective"), Layout(4, 1, 2), Layout(4, 2, 1, "half")):
        most = found.capacity(layout, 5)
        assert 0 < most < 32768
        unit = layout.tp * layout.cp
        for tokens, fits in ((most, True), (most + unit, False)):
            strategy = found.strategy_of([found.pipeline(layout, found.ranks, tokens)])
            memory = found.costs.memory(strategy, max(5, layout.cp))
            assert (max(memory.values()) <= found.costs.cluster.kind(0).memory_bytes) is fits


def test_more_replicas_and_more_recomputation_hold_more() -> None:
    found = layouts()
    assert found.capacity(Layout(4, 1, 1), 4) < found.capacity(Layout(4, 1, 1), 8)
    sizes = [found.capacity(Layout(4, 1, 1, kind), 5) for kind in ("none", "selective", "half", "full")]
    assert sizes == sorted(sizes)
    assert found.capacity(Layout(1, 1, 1), 32) == 0
    assert found.most_replicas == 8


def test_a_built_strategy_is_whole_fits_and_is_idle_where_it_has_no_work() -> None:
    found = layouts(16384)
    strategy = found.build(((Layout(8, 1, 1), 2), (Layout(4, 1, 1), 3)), 16384)
    assert strategy is not None
    strategy.check(LLAMA_32B.facts, found.ranks)
    assert strategy.idle_ranks == (28, 29, 30, 31)
    assert [p.max_tokens for p in strategy.pipelines] == [18928, 18928, 5032, 5032, 5032]
    assert found.build(((Layout(4, 1, 1), 8),), 16384) is None
    assert found.build(((Layout(1, 1, 1), 32),)) is None


def test_the_last_stage_has_fewer_layers_where_its_head_is_dear() -> None:
    def held(vocab_times: int) -> list[int]:
        from dataclasses import replace

        config = replace(LLAMA_32B, vocab_size=50304 * vocab_times)
        found = Layouts(SmallBatchCosts(config, Cluster.of_nodes({"h20": 4}), None, 4096, "bf16"), 4096)
        return [len(stage.layer_numbers) for stage in found.pipeline(Layout(4, 1, 4), found.ranks).stages]

    assert held(1) == [15, 15, 15, 15]
    assert held(8) == [16, 16, 16, 12]


def test_nothing_useful_is_dominated_and_nothing_that_holds_all_is_recomputed() -> None:
    found = layouts()
    useful = found.useful(8)
    assert Layout(4, 1, 1) in useful
    assert Layout(8, 2, 1) in useful
    assert Layout(8, 2, 1, "full") not in useful
    assert Layout(16, 1, 1) not in useful


def test_micro_batches_have_a_constant_where_nothing_was_measured() -> None:
    found = layouts(4096)
    work = found.work(Layout(4, 1, 2))
    assert work.constant == pytest.approx(30 * LAYER_SECONDS)
    cpu = SmallBatchCosts(LLAMA_TINY, Cluster.local_cpu(4), None, 1024, "fp32")
    assert cpu.layer_seconds == 0


def test_texts_name_what_differs_from_plain_tensor_parallelism() -> None:
    assert str(Layout(4, 2, 2, "full")) == "TP4 CP2 PP2 full"
    assert composition_text(((Layout(16, 1, 1), 1), (Layout(4, 1, 1), 4))) == "1 x TP16, 4 x TP4"


def test_devices_of_several_kinds_are_refused() -> None:
    cluster = Cluster.of_nodes({"h800": 1, "h20": 1})
    with pytest.raises(
        PlannerError, match="planned on one kind of device, and the cluster has h20, h800; plan each"
    ):
        Layouts(SmallBatchCosts(LLAMA_32B, cluster, None, 4096, "bf16"), 4096)
