"""The model against a naive one: logits, gradients, packing, first values, names and tracing."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from hetero_megatron.graph.nodes import Kind
from hetero_megatron.graph.trace import trace
from hetero_megatron.layers import initial_values
from hetero_megatron.models import Llama, LlamaConfig, build_single_device
from hetero_megatron.runtime.batch import IGNORE, Segments
from tests.models.naive_llama import naive_logits

T0 = LlamaConfig(4, 32, 64, 4, 2, 96, init_std=0.3)
Documents = list[tuple[Tensor, Tensor]]


def _documents(*lengths: int, seed: int = 0) -> Documents:
    """Tokens and next-token targets; one target in five is IGNORE."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for length in lengths:
        ids = torch.randint(3, 96, (length + 1,), generator=generator)
        targets = ids[1:].clone()
        targets[torch.arange(length) % 5 == 4] = IGNORE
        documents.append((ids[:-1], targets))
    return documents


def _packed(documents: Documents) -> tuple[Tensor, Tensor, Segments]:
    tokens, targets = (torch.cat(parts) for parts in zip(*documents, strict=True))
    return tokens, targets, Segments.of_lengths(tuple(len(ids) for ids, _ in documents))


def _gradients(model: Llama) -> dict[str, Tensor]:
    result = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return result


@pytest.mark.parametrize(
    "config", [T0, replace(T0, num_query_groups=1), replace(T0, num_query_groups=4), replace(T0, head_dim=16)]
)
def test_packed_logits_and_gradients_are_those_of_a_naive_model(config: LlamaConfig) -> None:
    model, documents = build_single_device(config, seed=0), _documents(7, 9, 1, 20)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = [naive_logits(weights, config, tokens) for tokens, _ in documents]
    loss = sum(
        F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
        for logits, (_, targets) in zip(expected, documents, strict=True)
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    tokens, targets, segments = _packed(documents)
    torch.testing.assert_close(model.logits(tokens, segments), torch.cat(expected), rtol=1e-4, atol=1e-5)
    ours = model(tokens, targets, segments)
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=0.0)
    ours.backward()
    for name, gradient in _gradients(model).items():
        right = weights[name].grad
        assert right is not None
        assert (gradient - right).abs().max() < 2e-5 * right.abs().max(), name


def test_packed_loss_and_gradients_are_the_sum_over_separate_documents() -> None:
    model, documents = build_single_device(T0, seed=0), _documents(7, 9, 5)
    total = 0.0
    for document in documents:
        loss = model(*_packed([document]))
        loss.backward()
        total += loss.item()
    separate = _gradients(model)
    packed = model(*_packed(documents))
    packed.backward()
    assert packed.item() == pytest.approx(total, rel=1e-6)
    for name, gradient in _gradients(model).items():
        torch.testing.assert_close(gradient, separate[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [(7, 9), (8, 8)])
def test_changing_document_a_leaves_the_loss_of_document_b_bit_equal(lengths: tuple[int, int]) -> None:
    model, (a, b) = build_single_device(T0, seed=0), _documents(*lengths)
    unscored = torch.full_like(a[1], IGNORE)
    changed = a[0].clone()
    changed[2] = (changed[2] + 1) % 96
    before = model(*_packed([(a[0], unscored), b]))
    assert torch.equal(model(*_packed([(changed, unscored), b])), before)
    assert not torch.equal(model(*_packed([(changed, a[1]), b])), model(*_packed([a, b])))


def test_what_stands_before_a_document_does_not_matter() -> None:
    model, (a, b, c) = build_single_device(T0, seed=0), _documents(7, 9, 5)
    alone = model.logits(*_packed([b])[::2])
    for first in (a, c):
        tokens, _, segments = _packed([first, b])
        torch.testing.assert_close(model.logits(tokens, segments)[-9:], alone, rtol=1e-5, atol=1e-5)


def test_empty_segments_change_neither_loss_nor_gradients() -> None:
    model = build_single_device(T0, seed=0)
    tokens, targets, segments = _packed(_documents(5, 4))
    plain = model(tokens, targets, segments)
    plain.backward()
    expected = _gradients(model)
    loss = model(tokens, targets, Segments(segments.positions_T, (0, 0, 5, 5, 9, 9)))
    loss.backward()
    assert torch.equal(loss, plain)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in _gradients(model).items())


def test_only_ignored_targets_or_one_token_documents_give_finite_gradients() -> None:
    model = build_single_device(T0, seed=0)
    tokens = torch.zeros(3, dtype=torch.int64)
    for targets in (torch.full((3,), IGNORE), torch.tensor([5, IGNORE, 6])):
        loss = model(tokens, targets, Segments.of_lengths((1, 1, 0, 1)))
        loss.backward()
        gradients = _gradients(model)
        assert all(gradient.isfinite().all() for gradient in gradients.values())
        if (targets == IGNORE).all():
            assert loss.item() == 0.0
            assert not any(gradient.any() for gradient in gradients.values())


def test_bf16_loss_is_near_the_fp32_one() -> None:
    config = replace(T0, init_std=0.05)
    tokens, targets, segments = _packed(_documents(20, 12))
    exact = build_single_device(config, seed=0)(tokens, targets, segments)
    rounded = build_single_device(config, seed=0, dtype=torch.bfloat16)(tokens, targets, segments)
    assert rounded.dtype is torch.float32
    torch.testing.assert_close(rounded, exact, rtol=5e-3, atol=0.0)


def test_the_start_is_small_where_the_residual_stream_is_added_to_and_one_in_the_norms() -> None:
    config = replace(T0, num_layers=8, init_std=0.02)
    starts = initial_values(Llama(config))
    assert starts.keys() == {name for name, _ in Llama(config).named_parameters()}
    for name, start in starts.items():
        if "norm" in name:
            assert start == ("ones",)
        else:
            assert start == ("normal", 0.005 if name.endswith(("wo.weight", "down.weight")) else 0.02)


def test_layers_and_halves_start_differently_and_the_seed_decides() -> None:
    model = build_single_device(T0, seed=7)
    wq = [model.get_parameter(f"layers.{i}.wq.weight") for i in range(4)]
    assert all((wq[i] != wq[j]).all() for i in range(4) for j in range(i))
    assert (wq[0][:16] != wq[0][16:]).all()
    again, other = build_single_device(T0, seed=7), build_single_device(T0, seed=8)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not torch.equal(wq[0], other.get_parameter("layers.0.wq.weight"))


def test_ten_steps_of_sgd_learn_a_repeated_batch() -> None:
    model = build_single_device(replace(T0, init_std=0.02), seed=0)
    batch = _packed(_documents(16, 16))
    losses = []
    for _ in range(10):
        loss = model(*batch)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.02 * parameter.grad
        model.zero_grad()
    assert losses[-1] < 0.9 * losses[0]


def test_the_graph_room_can_trace_the_model() -> None:
    graph = trace(Llama(replace(T0, num_layers=2)))
    leaves = [node.name for node in graph.nodes if node.kind is Kind.LEAF]
    assert {"tokens", "targets", "segments", "layers.1.wk.weight", "embedding.weight"} < set(leaves)
    reshards = [node.name for node in graph.nodes if node.kind is Kind.RESHARD]
    one_layer = ["entry", "attention_in", "attention_out", "mlp_in", "mlp_out"]
    layers = [f"layers.{i}.{name}" for i in range(2) for name in one_layer]
    assert reshards == ["embedding_out", *layers, "final_entry", "head_in"]


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return hasattr(m, "signature") or hasattr(m, "is_reshard")


def test_the_traced_model_has_the_expected_nodes_in_order_and_gives_the_same_loss() -> None:
    model = build_single_device(replace(T0, num_layers=2), seed=0)
    graph = _Tracer().trace(model)
    layer = ["entry", "attention_norm", "attention_in", "wq", "wk", "wv", "rope", "rope", "attention", "wo"]
    layer += ["attention_out", "+", "mlp_norm", "mlp_in", "gate", "up", "swiglu", "down", "mlp_out", "+"]
    expected = ["embedding", "embedding_out"]
    for i in range(2):
        expected += ["+" if name == "+" else f"layers.{i}.{name}" for name in layer]
    expected += ["final_entry", "final_norm", "head_in", "head", "loss"]
    calls = [node for node in graph.nodes if node.op.startswith("call")]
    assert [str(node.target) if node.op == "call_module" else "+" for node in calls] == expected
    assert [str(node.target) for node in graph.nodes if node.op == "placeholder"] == [
        "tokens_T", "targets_T", "segments",
    ]  # fmt: skip
    batch = _packed(_documents(7, 9))
    assert torch.equal(fx.GraphModule(model, graph)(*batch), model(*batch))


def test_a_copied_model_is_its_own() -> None:
    model = build_single_device(T0, seed=0)
    batch = _packed(_documents(7, 9))
    loss = model(*batch)
    copied = copy.deepcopy(model)
    nn.init.zeros_(model.head.weight)
    assert torch.equal(copied(*batch), loss)
    assert model(*batch).item() == pytest.approx(int((batch[1] != IGNORE).sum()) * 4.564348, rel=1e-6)


def test_a_tied_head_is_the_embedding_before_and_after_it_gets_values() -> None:
    model = Llama(replace(T0, tie_word_embeddings=True))
    for each in (model, model.materialize(7), build_single_device(model.config, 7)):
        assert each.head.weight is each.embedding.weight
        names = [name for name, _ in each.named_parameters()]
        assert "embedding.weight" in names
        assert "head.weight" not in names
    untied = build_single_device(T0, 7)
    assert torch.equal(model.embedding.weight, untied.embedding.weight), "the start follows from the name"
    assert not torch.equal(untied.head.weight, untied.embedding.weight)
