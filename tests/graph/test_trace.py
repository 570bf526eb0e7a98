"""Models become graphs of leaves, Reshards and operators."""

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetero_megatron.errors import GraphError
from hetero_megatron.graph import Kind, Symbol
from hetero_megatron.graph.trace import trace
from tests.graph import tiny


def test_nodes_are_named_by_module_path_and_a_second_call_is_numbered() -> None:
    graph = tiny.graph(1)
    names = [node.name for node in graph.nodes if node.kind is Kind.COMPUTE and node.module]
    assert names[:6] == [
        "embedding",
        "layers.0.attention_norm",
        "layers.0.wq",
        "layers.0.rope",
        "layers.0.wk",
        "layers.0.rope#1",
    ]
    assert graph.node("layers.0.rope#1").module == "layers.0.rope"
    assert graph.output == "loss"


def test_leaves_are_inputs_parameters_and_opaque_arguments() -> None:
    graph = tiny.graph(1)
    assert graph.inputs == ("tokens", "targets")
    assert graph.opaque == ("segments",)
    assert graph.parameters[:3] == (
        "embedding.weight",
        "layers.0.attention_norm.weight",
        "layers.0.wq.weight",
    )
    assert graph.reshards[:3] == ("embedding_out", "layers.0.entry", "layers.0.attention_in")
    assert graph.parameter_shape("layers.0.wk.weight") == (8, 32)


def test_operands_are_arguments_then_parameters_and_arguments_keep_the_opaque_ones() -> None:
    graph = tiny.graph(1)
    assert graph.node("layers.0.wq").inputs == ("layers.0.attention_in", "layers.0.wq.weight")
    attention = graph.node("layers.0.attention")
    assert attention.inputs == ("layers.0.rope", "layers.0.rope#1", "layers.0.wv")
    assert attention.arguments == (*attention.inputs, "segments")


def test_a_sum_is_a_node_without_module() -> None:
    (first, _) = [node for node in tiny.graph(1).nodes if node.function == "add"]
    assert first.inputs == ("layers.0.entry", "layers.0.attention_out")
    assert first.module == ""


def test_shapes_and_factor_sizes_are_known() -> None:
    graph = tiny.graph(1)
    assert graph.node("head").shape == (Symbol("T"), tiny.VOCAB)
    assert graph.node("loss").shape == ()
    assert dict(graph.node("layers.0.attention").sizes) == {"g": 2, "k": 4, "r": 4, "t": Symbol("T")}
    assert graph.size("head", 1) == tiny.VOCAB


def test_a_dim_that_arrives_with_the_data_has_no_size() -> None:
    with pytest.raises(GraphError, match="dim 0 of head is the symbol T: its size arrives with the data"):
        tiny.graph(1).size("head", 0)


def test_an_unknown_node_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(GraphError, match="no node 'layers.0.wk.weigth'; did you mean 'layers.0.wk.weight'"):
        tiny.graph(1).node("layers.0.wk.weigth")


def test_what_the_loss_does_not_need_is_left_out() -> None:
    class Wasteful(tiny.Model):
        def forward(self, tokens_T: Tensor, targets_T: Tensor, segments: object) -> Tensor:
            x_TD = self.embedding(tokens_T)
            self.head(x_TD)
            return x_TD

    graph = trace(Wasteful(0))
    assert [node.name for node in graph.nodes] == ["tokens", "embedding.weight", "embedding"]


def test_a_parameter_shared_by_two_modules_is_one_leaf() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = tiny.Embedding(5, 8), tiny.Linear(5, 8)
            self.head.weight = self.embedding.weight

        def forward(self, tokens_T: Tensor) -> Tensor:
            logits_TV: Tensor = self.head(self.embedding(tokens_T))
            return logits_TV

    assert trace(Tied()).parameters == ("embedding.weight",)


class _Forward(nn.Module):
    """A model around one forward function."""

    def __init__(self, function: Any, **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x_TD: Tensor, segments: object) -> Any:
        return self.function(self, x_TD, segments)


class _BadSignature(nn.Module):
    signature = "t i -> t i"


@pytest.mark.parametrize(
    ("function", "modules", "message"),
    [
        (lambda m, x, s: torch.relu(x), {}, "forward calls 'relu' .*: make it a leaf with a signature"),
        (lambda m, x, s: x.view(-1), {}, "forward calls 'view'"),
        (lambda m, x, s: x * 2, {}, "forward calls 'mul'"),
        (lambda m, x, s: x + 1, {}, "add: pass values of the graph, by position"),
        (lambda m, x, s: operator.add(x, x) if x.sum() > 0 else x, {}, "forward cannot be traced: "),
        (lambda m, x, s: (x, x), {}, "forward must return one value, the loss"),
        (lambda m, x, s: m.w(x, x), {"w": tiny.Linear(4, 4)}, "w: called with 2 arguments and 1 parameters"),
        (lambda m, x, s: m.rope(s, x), {"rope": tiny.Rotary()}, r"argument 0 \(segments\) must be annotated"),
        (lambda m, x, s: m.rope(x, x), {"rope": tiny.Rotary()}, r"argument 1 \(x\) must be opaque"),
        (lambda m, x, s: m.r(x, x), {"r": tiny.Reshard()}, "r: a Reshard takes one value, it is given 2"),
        (lambda m, x, s: m.bad(x), {"bad": _BadSignature()}, "bad: the signature of _BadSignature is a str"),
        (lambda m, x, s: x + m.n(x), {"n": tiny.RMSNorm(8)}, "n: operands disagree on 'h' .*: D and 8"),
    ],
)
def test_what_cannot_be_a_graph_is_refused(
    function: Any, modules: dict[str, nn.Module], message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        trace(_Forward(function, **modules))
