"""The memory model against reality: storages that live between F and B, and the buffers of real Sessions."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_megatron.activations import Numbers, Sizes, chunk_activations
from hetero_megatron.memory import Parts, estimate
from hetero_megatron.models.llama import Llama, build_single_device
from hetero_megatron.recompute import recomputed_runs
from hetero_megatron.runtime.recompute import generate_recomputed
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.stage import StageRun
from tests.distributed.training import T0, build, het4, sequences, stage, strategy, train
from tests.runtime.live import Live
from tests.runtime.test_recompute import M0, MIXED, batch

TOKENS = 512


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["none", "selective", "full", "mixed", "biased"])
def test_predicted_activations_are_what_a_forward_pass_leaves_alive(kind: str, dtype: torch.dtype) -> None:
    def recompute_of(layer: int) -> str:
        return MIXED[layer] if kind == "mixed" else "none" if kind == "biased" else kind

    biases = {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True} if kind == "biased" else {}
    model = build_single_device(replace(M0, **biases), 7, dtype)
    program = build(model, strategy((1, 1, [stage("0", "0-3")])))
    (chunk,) = program.executable(0).chunks
    runs = recomputed_runs(chunk.nodes, recompute_of)
    code, inputs = generate_recomputed(chunk.nodes, (), (), dict(model.named_modules()), {}, runs)
    run = StageRun(code, inputs, ends=True)
    with Live() as live:
        run.forward(0, batch(TOKENS), {})
    sizes = Sizes(program.annotated, 0, Numbers(TOKENS, dtype.itemsize, composed_norm=True))
    found = chunk_activations(program.annotated, chunk, sizes, recompute_of, False)
    assert found.kept == pytest.approx(live.bytes, rel=0.1)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_predicted_activations_are_what_each_rank_of_a_tensor_parallel_stage_keeps(
    sequence_parallel: bool,
) -> None:
    plan = strategy((1, 2, [stage("0-1", "0-1"), stage("2", "2-3")]), sequence_parallel=sequence_parallel)
    kept: dict[int, int] = {}

    def watch(session: Session) -> None:
        (run,) = session.stage._runs
        forward = run.forward

        def watched(*arguments: Any) -> Any:
            with Live() as live:
                result = forward(*arguments)
            kept[session.world.rank] = live.bytes
            return tuple(each.clone() for each in result)

        run.forward = watched  # type: ignore[method-assign]

    documents = sequences(2, 256)
    found = train(plan, [documents], prepare=watch, collect=lambda session: kept[session.world.rank])
    program = build(Llama(T0), plan)
    for rank, live in found.extra.items():
        (chunk,) = program.executable(rank).chunks
        sizes = Sizes(program.annotated, rank, Numbers(512, 4, composed_norm=True))
        activations = chunk_activations(program.annotated, chunk, sizes, lambda layer: "none", False)
        # What was received is there before the pass, and what is sent on leaves after it.
        sent = sum(sizes.bytes(program.annotated.graph.node(name).inputs[0]) for name in chunk.outputs)
        assert activations.kept - activations.received == pytest.approx(live - sent, rel=0.1), f"rank {rank}"


def buffers(session: Session) -> dict[str, int]:
    """Bytes of the flat buffers, each counted once, by what they are for."""
    state = session.state
    flats: dict[str, list[Tensor]] = {
        "parameters": [state.compute],
        "gradients": [state.accumulated, state.gradient],
        "master": [state.master],
        "moments": list(state.moments.values()),
    }
    seen: set[int] = set()
    found = dict.fromkeys(flats, 0)
    for kind, tensors in flats.items():
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                found[kind] += storage.nbytes()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero", [0, 1])
def test_predicted_states_are_the_buffers_of_a_session(zero: int, dtype: torch.dtype) -> None:
    plan = het4(zero=zero)
    real = train(plan, [sequences(4)], dtype=dtype, collect=buffers).extra
    for each in estimate(build(Llama(T0), plan), 16, dtype.itemsize):
        assert {name: getattr(each.parts, name) for name in real[each.rank]} == real[each.rank]
        assert each.host == 0


def test_predicted_states_in_host_memory_are_those_of_a_session() -> None:
    plan = het4(zero=1, offload_optimizer=True)
    real = train(plan, [sequences(4)], dtype=torch.bfloat16, collect=buffers).extra
    for each in estimate(build(Llama(T0), plan), 16, 2):
        found: Parts = each.parts
        assert (found.master, found.moments, found.parameters) == (0, 0, real[each.rank]["parameters"])
        assert found.total + each.host - found.activations - found.buffers - found.temporary == sum(
            real[each.rank].values()
        )
