"""Our side: a Session on the layout's strategy."""

import torch
from torch import Tensor

from benchmarks.peers.case import LR, SEED, Case, Layout
from hetero_megatron.cluster import Cluster
from hetero_megatron.data.batch import pack
from hetero_megatron.data.rows import Piece
from hetero_megatron.graph.trace import trace
from hetero_megatron.layers.initial import initial_value, initial_values
from hetero_megatron.models.llama import Llama
from hetero_megatron.program import Program
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.state import ParameterSlot
from hetero_megatron.runtime.world import World
from hetero_megatron.strategy import Pipeline, Stage, Strategy


def strategy(case: Case, layout: Layout, sequence_parallel: bool) -> Strategy:
    """Rank (pipeline, stage, tp), the last varying fastest; as equal a split of the layers as there is."""
    layers, pp, tp = case.config.num_layers, layout.pp, layout.tp
    cuts = [layers * stage // pp for stage in range(pp + 1)]

    def stage(copy: int, number: int) -> Stage:
        first = (copy * pp + number) * tp
        return Stage(tuple(range(first, first + tp)), (cuts[number], cuts[number + 1] - 1))

    return Strategy(
        tuple(
            Pipeline(case.micro_batches // layout.dp, 1, tuple(stage(copy, s) for s in range(pp)))
            for copy in range(layout.dp)
        ),
        sequence_parallel=sequence_parallel,
    )


class Ours:
    """A model on one rank, one step at a time."""

    def __init__(self, case: Case, layout: Layout, world: World, sequence_parallel: bool) -> None:
        model = Llama(case.config)
        plan = strategy(case, layout, sequence_parallel)
        program = Program.build(trace(model), plan, case.config.facts, Cluster.local_cpu(layout.ranks))
        specs = initial_values(model)

        def initial(slot: ParameterSlot) -> Tensor:
            return initial_value(slot.name, specs[slot.name], slot.bounds, slot.full_shape, SEED)

        settings = OptimizerSettings(lr=LR, train_iters=10**6)
        self.session = Session(program, world, dict(model.named_modules()), initial, settings, torch.float32)
        self._copy, _ = program.pipeline_of(world.rank)
        self._copies = layout.dp
        self.seconds: dict[str, float] = {}

    def batches(self, rows: Tensor) -> list[MicroBatch]:
        """The rows of this rank's pipeline."""
        own = rows.chunk(self._copies)[self._copy]
        return [pack([Piece(0, row[:-1].numpy(), row[1:].numpy())]) for row in own]

    def step(self, batches: list[MicroBatch]) -> float:
        """One update; the mean loss of all rows."""
        result = self.session.step(batches)
        self.seconds = dict(result.seconds)
        return result.loss
