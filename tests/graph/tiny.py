"""A Llama-like model of stubs: signatures and shapes only, nothing can be computed."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from hetero_megatron.annotation import Annotation, DeviceGroup, DistributedStates
from hetero_megatron.graph import Graph, Signature
from hetero_megatron.graph.trace import trace

HIDDEN, FFN, VOCAB, HEAD_DIM, HEADS, GROUPS = 32, 48, 50, 4, 8, 2


class Stub(nn.Module):
    signature: ClassVar[Signature]

    def __init__(self, *shape: int, head_dim: int = 0) -> None:
        super().__init__()
        if shape:
            self.weight = nn.Parameter(torch.empty(*shape, device="meta"))
        if head_dim:
            self.head_dim = head_dim


class Linear(Stub):
    signature = Signature.parse("t i, o i -> t o", linear=True)


class RMSNorm(Stub):
    signature = Signature.parse("t h, h -> t h", indivisible=("h",))


class Embedding(Stub):
    signature = Signature.parse("t, v h -> t h", linear=True, indivisible=("h",))


class Rotary(Stub):
    signature = Signature.parse("t c; segments -> t c")


class Attention(Stub):
    signature = Signature.parse(
        "t (g r k), t (g k), t (g k); segments -> t (g r k)", indivisible=("t", "k"), exact=("g", "r")
    )


class SwiGLU(Stub):
    signature = Signature.parse("t f, t f -> t f")


class CrossEntropy(Stub):
    signature = Signature.parse("t v, t ->", reduced=("v",))


class Reshard(nn.Module):
    is_reshard = True


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = Reshard()
        self.attention_norm = RMSNorm(HIDDEN)
        self.attention_in = Reshard()
        self.wq = Linear(HEADS * HEAD_DIM, HIDDEN)
        self.wk = Linear(GROUPS * HEAD_DIM, HIDDEN)
        self.wv = Linear(GROUPS * HEAD_DIM, HIDDEN)
        self.rope = Rotary()
        self.attention = Attention(head_dim=HEAD_DIM)
        self.wo = Linear(HIDDEN, HEADS * HEAD_DIM)
        self.attention_out = Reshard()
        self.mlp_norm = RMSNorm(HIDDEN)
        self.mlp_in = Reshard()
        self.gate = Linear(FFN, HIDDEN)
        self.up = Linear(FFN, HIDDEN)
        self.swiglu = SwiGLU()
        self.down = Linear(HIDDEN, FFN)
        self.mlp_out = Reshard()

    def forward(self, x_TD: Tensor, segments: object) -> Tensor:
        x_TD = self.entry(x_TD)
        h_TD = self.attention_in(self.attention_norm(x_TD))
        q_TC, k_TC = self.rope(self.wq(h_TD), segments), self.rope(self.wk(h_TD), segments)
        x_TD = x_TD + self.attention_out(self.wo(self.attention(q_TC, k_TC, self.wv(h_TD), segments)))
        h_TD = self.mlp_in(self.mlp_norm(x_TD))
        return x_TD + self.mlp_out(self.down(self.swiglu(self.gate(h_TD), self.up(h_TD))))


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = Embedding(VOCAB, HIDDEN)
        self.embedding_out = Reshard()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.final_norm = RMSNorm(HIDDEN)
        self.head_in = Reshard()
        self.head = Linear(VOCAB, HIDDEN)
        self.loss = CrossEntropy()

    def forward(self, tokens_T: Tensor, targets_T: Tensor, segments: object) -> Tensor:
        x_TD = self.embedding_out(self.embedding(tokens_T))
        for layer in self.layers:
            x_TD = layer(x_TD, segments)
        loss: Tensor = self.loss(self.head(self.head_in(self.final_norm(x_TD))), targets_T)
        return loss


def graph(layers: int = 2) -> Graph:
    return trace(Model(layers))


COLUMN = {"embedding", "wq", "gate", "up", "head"}
ROW = {"wo", "down"}
SEQUENCE = {"embedding_out", "entry", "attention_out", "mlp_out"}

Pipeline = tuple[tuple[tuple[int, ...], int], ...]
"""(ranks, number of layers) per stage."""


def plan_for(
    traced: Graph, pipelines: tuple[Pipeline, ...], sequence_parallel: bool = True
) -> dict[str, Annotation]:
    """Megatron's tensor and sequence parallelism, stage by stage."""
    plan: dict[str, Annotation] = {}
    for name in (*traced.inputs, *traced.parameters, *traced.reshards):
        groups = [_stage(name, pipeline) for pipeline in pipelines]
        data = name not in traced.parameters
        states = tuple(_states(name, len(ranks), traced, sequence_parallel) for ranks in groups)
        hdim = -1 if len(groups) == 1 or not data else 0
        plan[name] = Annotation(tuple(DeviceGroup(ranks) for ranks in groups), states, hdim)
    return plan


def _stage(name: str, pipeline: Pipeline) -> tuple[int, ...]:
    if name.startswith("layers."):
        layer = int(name.split(".")[1])
        for ranks, count in pipeline:
            if layer < count:
                return ranks
            layer -= count
    return pipeline[0 if name.startswith(("embedding", "tokens")) else -1][0]


def _states(name: str, tp: int, traced: Graph, sequence_parallel: bool) -> DistributedStates:
    module = name.removesuffix(".weight").rsplit(".", 1)[-1]
    parts: Mapping[int, int] = {-1: tp}
    if name in traced.parameters:
        if module in COLUMN:
            parts = {0: tp}
        elif module in ROW:
            parts = {1: tp}
        elif module in ("wk", "wv"):
            parts = {0: min(tp, GROUPS), -1: tp // min(tp, GROUPS)}
    elif sequence_parallel and module in SEQUENCE:
        parts = {0: tp}
    return DistributedStates.of(parts)
