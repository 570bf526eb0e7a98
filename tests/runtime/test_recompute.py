"""What recomputation keeps, what it computes again, and that nothing is paid without it."""

from collections.abc import Callable

import pytest
import torch

from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import Llama, build_single_device
from hetero_megatron.recompute import recomputed_runs
from hetero_megatron.runtime.batch import MicroBatch, Segments
from hetero_megatron.runtime.recompute import generate_recomputed
from hetero_megatron.runtime.stage import StageRun, generate
from tests.distributed.training import T0, build, micro_batch, sequences, stage, strategy
from tests.runtime.live import Live

M0 = LlamaConfig(
    num_layers=4,
    hidden_size=128,
    ffn_hidden_size=352,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=128,
)
LAYERS = M0.num_layers


def one_rank(model: Llama, recompute_of: Callable[[int], str]) -> StageRun:
    program = build(model, strategy((1, 1, [stage("0", f"0-{model.config.num_layers - 1}")])))
    (chunk,) = program.executable(0).chunks
    runs = recomputed_runs(chunk.nodes, recompute_of)
    code, inputs = generate_recomputed(chunk.nodes, (), (), dict(model.named_modules()), {}, runs)
    return StageRun(code, inputs, ends=True)


def batch(tokens: int = 256, vocab: int = 128) -> MicroBatch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocab, (tokens + 1,), generator=generator)
    return MicroBatch(ids[:-1], ids[1:], Segments.of_lengths((tokens // 2, tokens // 2)))


def pass_(run: StageRun, data: MicroBatch) -> tuple[float, int, Live, Live]:
    """Loss, live bytes between F and B, and what both passes did."""
    with Live() as forward:
        (loss,) = run.forward(0, data, {})
    kept = forward.bytes
    with Live() as backward:
        run.backward(0, [])
    return loss.item(), kept, forward, backward


MIXED = {0: "full", 1: "selective", 2: "none", 3: "full"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["full", "selective", "mixed"])
def test_gradients_are_bit_equal_with_and_without_recomputation(kind: str, dtype: torch.dtype) -> None:
    model, data = build_single_device(M0, 7, dtype), batch()
    found = []
    for recompute_of in (lambda layer: "none", lambda layer: MIXED[layer] if kind == "mixed" else kind):
        model.zero_grad()
        loss, _, _, _ = pass_(one_rank(model, recompute_of), data)
        found.append((loss, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
    (loss, gradients), (again, recomputed) = found
    assert loss == again
    assert gradients.keys() == recomputed.keys()
    assert all(torch.equal(gradients[name], recomputed[name]) for name in gradients)


def test_full_keeps_less_than_selective_which_keeps_less_than_none() -> None:
    model, data = build_single_device(M0, 7), batch()
    kept = {
        kind: pass_(one_rank(model, lambda layer, k=kind: k), data)[1]
        for kind in ("full", "selective", "none")
    }
    mixed = pass_(one_rank(model, lambda layer: MIXED[layer]), data)[1]
    assert kept["full"] < mixed < kept["none"]
    assert kept["full"] < kept["selective"] < kept["none"]
    tokens, hidden, ffn, item = 256, M0.hidden_size, M0.ffn_hidden_size, 4
    # silu(gate), its product with up, and the attention's result and statistics are gone.
    fewer = kept["none"] - kept["selective"]
    heads = M0.num_attention_heads
    assert fewer == LAYERS * tokens * item * (2 * ffn + hidden + heads)
    # And with full recomputation a layer keeps its input alone.
    by_layer = (kept["none"] - kept["full"]) / LAYERS
    assert by_layer > tokens * item * (2 * hidden + 2 * hidden + 4 * ffn)


def test_no_matrix_product_runs_twice_but_those_of_fully_recomputed_layers() -> None:
    model, data = build_single_device(M0, 7), batch()
    products = {}
    attentions = {}
    for kind in ("none", "selective", "full"):
        _, _, forward, backward = pass_(one_rank(model, lambda layer, k=kind: k), data)
        products[kind] = backward.calls["aten::mm"] + forward.calls["aten::mm"]
        attentions[kind] = sum(
            count
            for calls in (forward.calls, backward.calls)
            for name, count in calls.items()
            if "scaled_dot_product" in name and "backward" not in name
        )
    assert products["selective"] == products["none"]
    # wq, wk, wv, wo, gate and up: the product of `down` ends a layer, and nobody needs it again.
    assert products["full"] == products["none"] + 6 * LAYERS
    assert attentions["selective"] == attentions["full"] == 2 * attentions["none"]


def test_micro_batches_in_flight_come_back_in_any_order() -> None:
    """Positions and document borders are those of the micro-batch that is computed again."""
    model = build_single_device(T0, 7)
    batches = [micro_batch([d[: 4 + 4 * n], d[4 + 4 * n :]]) for n, d in enumerate(sequences(3))]
    run = one_rank(model, lambda layer: "full")
    for number, each in enumerate(batches):
        run.forward(number, each, {})
    for number in (1, 2, 0):
        run.backward(number, [])
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    torch.stack([model(b.tokens_T, b.targets_T, b.segments) for b in batches]).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=lambda m, n=name: f"{n}: {m}")


def test_without_recomputation_the_code_is_the_same() -> None:
    model = build_single_device(T0, 7)
    program = build(model, strategy((1, 1, [stage("0", "0-3")])))
    (chunk,) = program.executable(0).chunks
    modules = dict(model.named_modules())
    assert recomputed_runs(chunk.nodes, lambda layer: "none") == ()
    plain, inputs = generate(chunk.nodes, (), (), modules, {})
    code, names = generate_recomputed(chunk.nodes, (), (), modules, {}, ())
    assert (code.code, names) == (plain.code, inputs)
    again, _ = generate_recomputed(
        chunk.nodes, (), (), modules, {}, recomputed_runs(chunk.nodes, lambda layer: "full")
    )
    assert again.code.count("recomputed_") > 0
    assert "wq" not in again.code
