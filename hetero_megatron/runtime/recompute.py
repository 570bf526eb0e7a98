"""Activation recomputation: a run of operators that keeps what enters it and computes the rest again (paper §6.2).

Communication inside a run is repeated too. All ranks of a tensor-parallel group run the same operators in the same
order, and a run ends for all of them at the same operator: the last one that keeps anything for its backward.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from hetero_megatron.graph.nodes import Kind, Node
from hetero_megatron.recompute import Run, external_values
from hetero_megatron.runtime.stage import INPUTS, generate


class Recomputed(nn.Module):
    """Generated code whose inner values are dropped after the forward pass and made again before the backward."""

    def __init__(self, code: fx.GraphModule) -> None:
        super().__init__()
        self.code = code

    def forward(self, *arguments: Any) -> Tensor:
        """The run's one result. Nothing in a Llama is random, so no generator state is kept."""
        if not torch.is_grad_enabled():
            return self._run(*arguments)
        result: Tensor = checkpoint(
            self._run, *arguments, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
        )
        return result

    def _run(self, *arguments: Any) -> Tensor:
        (result,) = self.code(*arguments)
        return result


def generate_recomputed(
    nodes: Sequence[Node],
    received: Sequence[str],
    sent: Sequence[str],
    modules: Mapping[str, nn.Module],
    edges: Mapping[tuple[str, int], nn.Module],
    runs: Sequence[Run] = (),
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """`generate`, with each of `runs` as one module that recomputes; without runs the code is the same."""
    folded: list[Node] = []
    known, open_edges = dict(modules), dict(edges)
    at = 0
    for run in runs:
        inside = nodes[run.first : run.end]
        entering = [name for name in external_values(nodes, run) if name not in INPUTS]
        outside = (*nodes[: run.first], *nodes[run.end :])
        used = {name for node in outside for name in node.arguments} | set(sent)
        results = [node.name for node in inside if node.name in used] or [inside[-1].name]
        assert len(results) == 1, f"a recomputed run has one result, this one has {results}"
        code, inputs = generate(inside, entering, results, modules, edges)
        target = f"recomputed_{run.first}"
        known[target] = Recomputed(code)
        for node in inside:
            for place in range(len(node.arguments)):
                open_edges.pop((node.name, place), None)
        folded += nodes[at : run.first]
        folded.append(Node(results[0], Kind.COMPUTE, module=target, arguments=inputs))
        at = run.end
    folded += nodes[at:]
    return generate(folded, received, sent, known, open_edges)
