"""A chunk of the executable graph as generated code, and its forward and backward passes (paper §6.2, §6.3).

A chunk is code-generated once: interpreting it node by node costs up to half as much again on small layers.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hetero_megatron.annotation import Annotation
from hetero_megatron.comm.steps import CommPlan, Copy
from hetero_megatron.graph.nodes import Node
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.clock import Clock
from hetero_megatron.runtime.deferred import Deferred
from hetero_megatron.runtime.exchange import Exchange
from hetero_megatron.runtime.offload import Offload, Trip
from hetero_megatron.runtime.slices import Shape
from hetero_megatron.runtime.world import Groups

INPUTS: Mapping[str, Callable[[MicroBatch], Any]] = {
    "tokens": lambda batch: batch.tokens_T,
    "targets": lambda batch: batch.targets_T,
    "segments": lambda batch: batch.segments,
}


class ShapedExchange:
    """An activation Reshard that stays inside its group: one compiled Exchange per shape seen lately."""

    def __init__(self, plan: CommPlan, rank: int, groups: Groups, clock: Clock, deferred: Deferred) -> None:
        self.plan, self._rank, self._groups, self._clock = plan, rank, groups, clock
        self._deferred = deferred
        self._exchange = lru_cache(maxsize=256)(self._compile)

    def _compile(self, shape: Shape) -> Exchange:
        shapes = [full_shape(self.plan.src, self._rank, shape)]
        return Exchange(self.plan, self._rank, self._groups, shapes, meets_at_once=True)

    def __call__(self, shard: Tensor) -> Tensor:
        """The shard in the destination layout; what is deferred runs behind the exchange."""
        at = time.perf_counter()
        finish = self._exchange(tuple(shard.shape)).start([shard])
        at += self._deferred.run()
        result = finish()[0]
        self._clock.add("communication", at)
        return result


def full_shape(annotation: Annotation, rank: int, shape: Shape) -> Shape:
    """The full shape of an activation from a rank's local one; each pipeline counts its own tokens."""
    sizes = list(shape)
    for dim, lo, hi in annotation.region(rank).cuts:
        sizes[dim] = int(sizes[dim] / (hi - lo))
    return tuple(sizes)


class _Reshard(torch.autograd.Function):
    """Two plans, forward and gradient (None: nothing to do)."""

    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, forward: ShapedExchange | None, backward: ShapedExchange | None
    ) -> Tensor:
        ctx.exchange = backward
        if forward is None:
            return shard.view_as(shard)
        result = forward(shard)
        if result is shard:
            ctx.mark_dirty(shard)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        if ctx.exchange is not None:
            gradient = ctx.exchange(gradient.contiguous())
        return gradient, None, None


class Reshards:
    """Binds the Reshards of one rank; those with the same plan share what is compiled for it.

    What they take is booked on `clock` as communication. `deferred` runs behind gradients' exchanges.
    """

    def __init__(
        self, rank: int, groups: Groups, clock: Clock | None = None, deferred: Deferred | None = None
    ) -> None:
        self._rank, self._groups, self._clock = rank, groups, clock or Clock()
        self._deferred = deferred or Deferred()
        self._by_plan: dict[int, ShapedExchange] = {}

    def bind(self, forward: CommPlan | None, backward: CommPlan | None) -> Callable[[Tensor], Tensor] | None:
        """The function that a Reshard inside a group runs; None where this rank only keeps what it has."""
        ahead, back = self._shaped(forward), self._shaped(backward)
        if ahead is None and back is None:
            return None

        def exchange(shard: Tensor) -> Tensor:
            result: Tensor = _Reshard.apply(shard, ahead, back)
            return result

        return exchange

    def _shaped(self, plan: CommPlan | None) -> ShapedExchange | None:
        if plan is None or is_kept(plan, self._rank):
            return None
        # Plans are resolved once per pair of annotations, so the same plan is the same object.
        if id(plan) not in self._by_plan:
            self._by_plan[id(plan)] = ShapedExchange(
                plan, self._rank, self._groups, self._clock, self._deferred
            )
        return self._by_plan[id(plan)]


def is_kept(plan: CommPlan, rank: int) -> bool:
    """Whether `rank` ends with the shard it began with, as a TP1 pipeline does where another one gathers."""
    region = plan.src.region(rank)
    return all(
        stage.after.region(rank) == region and all(isinstance(step, Copy) for step in stage.steps)
        for stage in plan.for_rank(rank)
    )


class EdgeReduce(nn.Module):
    """Identity whose gradient is summed: an activation edge with a Partial gradient (decision 2)."""

    def __init__(self, exchange: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.exchange = exchange

    def forward(self, shard: Tensor) -> Tensor:
        """The shard itself."""
        return self.exchange(shard)


def generate(
    nodes: Sequence[Node],
    received: Sequence[str],
    sent: Sequence[str],
    modules: Mapping[str, nn.Module],
    edges: Mapping[tuple[str, int], nn.Module],
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """The nodes as code: a module and the names of its inputs, `received` values first.

    It returns the `sent` values, or the last node's (the loss) when nothing is sent.
    """
    graph = fx.Graph()
    values: dict[str, fx.Node] = {}
    inputs: list[str] = []

    def placeholder(name: str) -> None:
        inputs.append(name)
        values[name] = graph.placeholder(name.replace(".", "_"))

    for name in received:
        placeholder(name)
    for name in dict.fromkeys(name for node in nodes for name in node.arguments if name in INPUTS):
        placeholder(name)
    root: dict[str, nn.Module] = {}
    for node in nodes:
        arguments = []
        for place, name in enumerate(node.arguments):
            argument = values[name]
            if edge := edges.get((node.name, place)):
                target = f"edge_{node.name}_{place}".replace(".", "_").replace("#", "_")
                root[target] = edge
                argument = graph.call_module(target, (argument,))
            arguments.append(argument)
        if node.module:
            root[node.module] = modules[node.module]
            values[node.name] = graph.call_module(node.module, tuple(arguments))
        else:
            values[node.name] = graph.call_function(torch.add, tuple(arguments))
    outputs = tuple(values[name] for name in sent) or (values[nodes[-1].name],)
    graph.output(outputs)
    return fx.GraphModule(root, graph), tuple(inputs)


class _InFlight(NamedTuple):
    """A micro-batch between F and B. What was sent is not kept, only the place where its gradient enters."""

    leaves: list[Tensor]
    ends: tuple[GradientEdge, ...]
    trip: Trip | None


class StageRun:
    """One chunk's passes over micro-batches; holds what a micro-batch needs between F and B."""

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: tuple[str, ...],
        ends: bool,
        offload: Offload | None = None,
        deferred: Deferred | None = None,
    ) -> None:
        """`deferred`: what a backward pass may leave to its end."""
        self.module, self.inputs, self.ends, self._offload = module, inputs, ends, offload
        self._deferred = deferred or Deferred()
        self._saved: dict[int, _InFlight] = {}

    def forward(self, number: int, batch: MicroBatch, received: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """F of micro-batch `number`: the values to send, or the loss sum on the last stage.

        Where gradients are off, as in evaluation, nothing is kept for a backward pass.
        """
        train = torch.is_grad_enabled()
        arguments: list[Any] = []
        leaves: list[Tensor] = []
        for name in self.inputs:
            if name in received:
                leaf = received[name].requires_grad_(train)
                leaves.append(leaf)
                arguments.append(leaf)
            else:
                arguments.append(INPUTS[name](batch))
        if not train:
            evaluated: tuple[Tensor, ...] = self.module(*arguments)
            return evaluated
        trip: Trip | None = None
        if self._offload is None:
            outputs: tuple[Tensor, ...] = self.module(*arguments)
        else:
            with self._offload.forward(self.module.parameters()) as trip:
                outputs = self.module(*arguments)
        self._saved[number] = _InFlight(leaves, tuple(map(get_gradient_edge, outputs)), trip)
        return tuple(output.detach() for output in outputs)

    def backward(self, number: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """B of micro-batch `number`: gradients of the received values. The loss is its own start."""
        held = self._saved.pop(number)
        if held.trip is not None:
            held.trip.start_back()
        torch.autograd.backward(held.ends, None if self.ends else list(gradients))
        self._deferred.run()
        return tuple(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in held.leaves)

    @property
    def in_flight(self) -> int:
        """Number of micro-batches between F and B."""
        return len(self._saved)
