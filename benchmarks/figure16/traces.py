"""The traces of Figure 16 (paper §9, Tables 11 and 12) with the paper's own strategies, for a model that fits a CPU.

Ranks, degrees, stages and who is lost are the paper's. Layers and rows are as many as asked for: with 60 and 64 the
strategies are those of `recipes/paper`, stage by stage; with fewer, borders between stages that differ still differ.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

from hetero_megatron.recipe import load_recipe
from hetero_megatron.strategy import Pipeline, Stage, Strategy
from hetero_megatron.strategy_yaml import strategy_yaml

ROOT = Path(__file__).parent.parent.parent
PAPER_LAYERS = 60


@dataclass(frozen=True, slots=True)
class Change:
    """What happens at the end of a configuration, and the one after it: ranks that are killed, or a node that starts."""

    after: str
    lost: tuple[int, ...] = ()
    node: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """A course of configurations on `nodes` nodes of `node_size` ranks each, of which the first `present` begin."""

    title: str
    first: str
    changes: tuple[Change, ...]
    nodes: int
    node_size: int = 8
    present: int | None = None

    @property
    def configurations(self) -> tuple[str, ...]:
        """In the order in which they are gone through."""
        return (self.first, *(change.after for change in self.changes))

    def node_of(self, rank: int) -> int:
        """Nodes have consecutive ranks."""
        return rank // self.node_size


TRACES: Mapping[str, Trace] = {
    "h20": Trace(
        "32 H20: one GPU fails, then its node",
        "c1",
        (Change("c2", (31,)), Change("c3", tuple(range(24, 31)))),
        nodes=4,
    ),
    "mixed": Trace(
        "16 H800 and 32 H20: a node fails, then a GPU, then its node",
        "c4",
        (Change("c5", tuple(range(40, 48))), Change("c6", (15,)), Change("c7", tuple(range(8, 15)))),
        nodes=6,
    ),
    "grow": Trace(
        "24 H20, and a node of 8 more that comes later", "c3", (Change("c1", node=3),), nodes=4, present=3
    ),
}


def strategies(trace: Trace, layers: int, rows: int) -> dict[str, Strategy]:
    """The paper's strategies of a trace by configuration, for so many layers and rows of a step."""
    whole = {
        name: load_recipe(ROOT / "recipes" / "paper" / f"{name}.yaml").make_strategy()
        for name in trace.configurations
    }
    border = _borders(tuple(whole.values()), layers)
    return {name: _reduced(strategy, border, rows) for name, strategy in whole.items()}


def _borders(whole: Sequence[Strategy], layers: int) -> dict[int, int]:
    """New first layer by old first layer, over all strategies; every run between two borders keeps a layer."""
    chunks = {chunk for each in whole for p in each.pipelines for stage in p.stages for chunk in stage.chunks}
    borders = sorted({0, PAPER_LAYERS, *(first for first, _ in chunks)})
    sizes = [max(1, round((end - first) * layers / PAPER_LAYERS)) for first, end in pairwise(borders)]
    return dict(zip(borders, accumulate(sizes, initial=0), strict=True))


def _reduced(strategy: Strategy, border: Mapping[int, int], rows: int) -> Strategy:
    def stage(old: Stage) -> Stage:
        ((first, last),) = old.chunks
        return replace(old, layers=(border[first], border[last + 1] - 1))

    shares = _shares([p.micro_batches * p.micro_batch_size for p in strategy.pipelines], rows)
    pipelines = []
    for pipeline, share in zip(strategy.pipelines, shares, strict=True):
        size = math.gcd(share, pipeline.micro_batch_size)
        pipelines.append(Pipeline(share // size, size, tuple(map(stage, pipeline.stages))))
    return replace(strategy, pipelines=tuple(pipelines))


def _shares(whole: Sequence[int], rows: int) -> list[int]:
    """`rows` in proportion to `whole`, rounded in favour of the larger, so that unequal ones stay unequal."""
    found, left, total = [0] * len(whole), rows, sum(whole)
    for place in sorted(range(len(whole)), key=lambda each: -whole[each]):
        found[place] = math.ceil(left * whole[place] / total)
        left, total = left - found[place], total - whole[place]
    return found


def one_device(strategy: Strategy) -> Strategy:
    """The same rows and layers on rank 0 alone."""
    rows = sum(p.micro_batches * p.micro_batch_size for p in strategy.pipelines)
    return Strategy((Pipeline(rows, 1, (Stage((0,), (0, _last_layer(strategy))),)),))


def _last_layer(strategy: Strategy) -> int:
    return max(last for stage in strategy.pipelines[0].stages for _, last in stage.chunks)


def write_recipe(
    folder: Path, name: str, trace: Trace, strategy: Strategy, prepared: Sequence[Strategy], steps: int
) -> Path:
    """The recipe of a run of `steps` steps that begins with `strategy`; its files and its output are in `folder`."""
    plans = []
    for number, other in enumerate(prepared):
        plan = folder / f"{name}_plan_{number}.yaml"
        plan.write_text(strategy_yaml(other))
        plans.append(str(plan))
    rows = sum(p.micro_batches * p.micro_batch_size for p in strategy.pipelines)
    cluster = ""
    if len(strategy.ranks) > 1:
        cluster = f"cluster: {{cpu: {{nodes: {trace.nodes}, devices_per_node: {trace.node_size}}}}}"
    path = folder / f"{name}.yaml"
    path.write_text(
        strategy_yaml(strategy)
        + f"""
model:
  preset: llama_tiny
  num_layers: {_last_layer(strategy) + 1}
  hidden_size: 64
  ffn_hidden_size: 128
  num_attention_heads: 8
  num_query_groups: 4
{cluster}
data: {{folder: {ROOT / "planner"}, suffixes: [.py], workers: 0, cache: {folder / "data"}}}
training:
  train_iters: {steps}
  global_batch_size: {rows}
  seq_length: 32
  # Adam turns the rounding of a gradient into lr / adam_eps times as much. At ten times this rate the gradients of some
  # steps depend on rounding: one device with other micro-batches is then as far from itself (1e-3 of their norm).
  lr: 3.0e-4
  adam_eps: 1.0e-2
  log_interval: 1
# Many processes share few cores here: nobody is given up for being slow.
elastic: {{heartbeat_s: 120, timeout_s: 600, phase_s: 600, plans: {plans}}}
output: {folder / name}
"""
    )
    return path
