"""Recomputed activations change nothing but memory: every strategy still trains the model of one device."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from hetero_megatron.runtime import offload
from hetero_megatron.strategy import Pipeline, Recompute, Stage, Strategy
from tests.distributed.training import (
    assert_parity,
    het4,
    reference,
    sequences,
    stage,
    strategy,
    train,
)

STEPS = tuple(sequences(24)[start : start + 4] for start in (0, 4, 8))

FULL, SELECTIVE = (Recompute("full"),), (Recompute("selective"),)
KINDS: Mapping[str, tuple[Recompute, ...]] = {"full": FULL, "selective": SELECTIVE}
TP2 = strategy((2, 2, [stage("0-1", "0-3")]))
PP2 = strategy((4, 1, [stage("0", "0-1"), stage("1", "2-3")]))


def each_stage(plan: Strategy, change: Mapping[tuple[int, int], tuple[Recompute, ...]]) -> Strategy:
    """`plan` with other recomputation on the stages named by (pipeline, stage)."""

    def changed(p: int, s: int, part: Stage) -> Stage:
        return replace(part, recompute=change.get((p, s), part.recompute))

    return replace(
        plan,
        pipelines=tuple(
            replace(pipeline, stages=tuple(changed(p, s, part) for s, part in enumerate(pipeline.stages)))
            for p, pipeline in enumerate(plan.pipelines)
        ),
    )


def everywhere(plan: Strategy, entries: tuple[Recompute, ...], offload: bool = False) -> Strategy:
    def pipeline(each: Pipeline) -> Pipeline:
        stages = (replace(part, recompute=entries, offload=offload) for part in each.stages)
        return replace(each, stages=tuple(stages))

    return replace(plan, pipelines=tuple(map(pipeline, plan.pipelines)))


MIXED = (Recompute("full", (0, 0)), Recompute("selective", (2, 3)))
LAYOUTS = {
    "TP2 full": everywhere(TP2, FULL),
    "TP2 selective": everywhere(TP2, SELECTIVE),
    "TP2 mixed by layer": everywhere(TP2, MIXED),
    "PP2 different by stage": each_stage(PP2, {(0, 0): FULL, (0, 1): SELECTIVE}),
    "PP2 last stage only": each_stage(PP2, {(0, 1): (Recompute("full", (3, 3)),)}),
    "HET4 full": everywhere(het4(), FULL),
    "HET4 selective": everywhere(het4(), SELECTIVE),
    "HET4 different by pipeline": each_stage(het4(), {(0, 0): MIXED[:1], (1, 0): MIXED}),
}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_three_steps_with_recomputation_equal_one_device(name: str, sequence_parallel: bool) -> None:
    plan = replace(LAYOUTS[name], sequence_parallel=sequence_parallel)
    assert_parity(train(plan, STEPS), reference(STEPS))


OFFLOADED = {
    "TP2": everywhere(TP2, (), offload=True),
    "PP2": everywhere(PP2, (), offload=True),
    "HET4": everywhere(het4(), (), offload=True),
    "HET4 with full recomputation": everywhere(het4(), FULL, offload=True),
    "HET4 mixed by layer": everywhere(het4(), (), offload=True),
}
OFFLOADED["HET4 mixed by layer"] = each_stage(
    OFFLOADED["HET4 mixed by layer"], {(0, 0): (Recompute("full", (0, 0)), Recompute("selective", (1, 1)))}
)


CP2 = strategy((2, 2, [stage("0-3", "0-2", cp=2), stage("4-5", "3", cp=2)]))


@pytest.mark.parametrize("variant", ["ring", "ulysses"])
@pytest.mark.parametrize("entries", [FULL, SELECTIVE], ids=["full", "selective"])
def test_context_parallel_attention_is_communicated_again(
    entries: tuple[Recompute, ...], variant: str
) -> None:
    plan = replace(everywhere(CP2, entries, offload=True), context_parallel=variant)
    assert_parity(train(plan, STEPS), reference(STEPS))


@pytest.mark.parametrize("entries", [FULL, SELECTIVE], ids=["full", "selective"])
def test_three_steps_with_recomputation_and_cut_optimizer_states_equal_one_device(
    entries: tuple[Recompute, ...],
) -> None:
    assert_parity(train(everywhere(het4(zero=1), entries), STEPS), reference(STEPS))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", OFFLOADED)
def test_three_steps_with_offloaded_activations_equal_one_device(
    name: str, sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "SMALLEST_OFFLOADED", 256)
    plan = replace(OFFLOADED[name], sequence_parallel=sequence_parallel)
    found = train(plan, STEPS, collect=lambda session: session.stage._offload.buffers.free_bytes)
    assert all(moved > 0 for moved in found.extra.values()), "every rank has moved something"
    assert_parity(found, reference(STEPS))


def test_bf16_steps_are_bit_equal_with_and_without_recomputation_and_offload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload, "SMALLEST_OFFLOADED", 256)
    plain = train(het4(), STEPS, dtype=torch.bfloat16)
    for entries, moved in ((FULL, False), (SELECTIVE, True), (MIXED[:0], True)):
        found = train(everywhere(het4(), entries, moved), STEPS, dtype=torch.bfloat16)
        assert found.losses == plain.losses
        for name, tensors in plain.tensors.items():
            for kind, tensor in tensors.items():
                assert torch.equal(found.tensors[name][kind], tensor), f"{kind} of {name}"
