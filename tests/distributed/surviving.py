"""Training that loses ranks: the tiny Llama under a supervisor, and what its survivors say afterwards."""

import os
import pickle
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hetero_megatron.cluster import Cluster
from hetero_megatron.data.dispatch import deal
from hetero_megatron.graph.trace import trace
from hetero_megatron.layers.initial import initial_value, initial_values
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import Llama
from hetero_megatron.program import Program
from hetero_megatron.runtime.checkpoint import Saver
from hetero_megatron.runtime.checkpoint_files import MARKER, Marker, checkpoints, checksum
from hetero_megatron.runtime.elastic import ElasticSession
from hetero_megatron.runtime.faults import Fault, Faults
from hetero_megatron.runtime.launch import preload
from hetero_megatron.runtime.making import Making
from hetero_megatron.runtime.membership import Member
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.recovery import Recovery
from hetero_megatron.runtime.session import Session, StepResult
from hetero_megatron.runtime.state import ParameterSlot
from hetero_megatron.runtime.supervisor import Limits, Node, Supervisor
from hetero_megatron.runtime.world import Groups, World
from hetero_megatron.shrink import shrink
from hetero_megatron.strategy import ModelFacts, Strategy
from tests.distributed.training import ADAM, T0, Outcome, StepData, assemble, micro_batch

Next = Callable[[Strategy, ModelFacts, Collection[int]], Strategy]


@dataclass
class Survival:
    """What the survivors of a run say.

    Attributes:
        pids: by rank, of those that ended well; `first_pids` of all that began.
        seen: by rank and iteration that counts, its pipeline's number and which rows of the step it took.
        saved, unsaved: iterations of complete checkpoints that are whole, and folders that are none, at the end.
    """

    code: int
    outcome: Outcome
    pids: dict[int, int] = field(default_factory=dict)
    first_pids: dict[int, int] = field(default_factory=dict)
    recoveries: dict[int, list[Recovery]] = field(default_factory=dict)
    commits: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    seen: dict[int, dict[int, tuple[int, tuple[int, ...]]]] = field(default_factory=dict)
    saved: list[int] = field(default_factory=list)
    unsaved: list[str] = field(default_factory=list)


def survive(
    plan: Strategy,
    steps: Sequence[StepData],
    faults: Sequence[Fault] = (),
    config: LlamaConfig = T0,
    settings: OptimizerSettings = ADAM,
    seed: int = 7,
    limits: Limits | None = None,
    timeout_s: float = 60.0,
    prepare: Callable[[ElasticSession], None] | None = None,
    in_step: Callable[[ElasticSession, int], None] | None = None,
    copies: bool = False,
    returning: bool = False,
    after: Next = shrink,
    saving: bool = False,
) -> Survival:
    """Train `steps` from `plan`; `after` gives the strategy for those who are left of `plan`.

    With `saving`, every step is saved, by a thread while the next one is made.
    """
    torch.set_num_threads(1)
    preload(recompute=False)
    model = Llama(config)
    graph, facts = trace(model), config.facts
    specs = initial_values(model)
    cluster = Cluster.local_cpu(max((*plan.ranks, *plan.idle_ranks)) + 1)
    program = Program.build(graph, plan, facts, cluster)

    def initial(slot: ParameterSlot) -> torch.Tensor:
        return initial_value(slot.name, specs[slot.name], slot.bounds, slot.full_shape, seed)

    class Following:
        """The strategy that `after` gives."""

        def strategy(self, base: Program, ranks: tuple[int, ...]) -> tuple[Strategy, str]:
            del base
            return after(plan, facts, ranks), ""

        def program(self, following: Strategy, ranks: tuple[int, ...]) -> Program:
            return Program.build(graph, following, facts, cluster.without(set(cluster.ranks) - set(ranks)))

    making = Making(lambda: dict(Llama(config).named_modules()), settings, timeout_s=20.0, copies=copies)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def start(first: Program, world: World, groups: Groups) -> Session | None:
            if world.rank not in first.strategy.ranks:
                return None
            session = making.session(first, world, groups)
            session.start(initial)
            return session

        def main(member: Member) -> None:
            (folder / f"{member.rank}.pid").write_text(str(os.getpid()))
            elastic = ElasticSession(
                member, program, making, start, Following(), faults=Faults(faults) if faults else None
            )
            if elastic.came_late:
                return
            if prepare:
                prepare(elastic)
            results: dict[int, StepResult] = {}
            commits: list[tuple[int, float]] = []
            gradients: dict[str, torch.Tensor] = {}
            took: dict[int, tuple[int, tuple[int, ...]]] = {}

            def hook(slot: ParameterSlot, gradient: torch.Tensor, divisor: float) -> None:
                gradients[slot.name] = gradient / max(divisor, 1.0)

            def body(session: Session) -> Any:
                session.gradient_hook = hook
                if elastic.completed is not None:
                    results[elastic.completed.iteration] = elastic.completed
                own = session.program
                number, _ = own.pipeline_of(session.world.rank)
                sizes = [(p.micro_batches, p.micro_batch_size) for p in own.strategy.pipelines]
                saver = None
                if saving:
                    saver = Saver(folder / "saves", session, keep_last=2, forsaken=bool(elastic.recoveries))
                    saver.amid = partial(elastic.strike, "saving")
                try:
                    while session.iteration < len(steps):
                        if in_step:
                            in_step(elastic, session.iteration + 1)
                        documents = steps[session.iteration]
                        dealt = deal(len(documents), sizes)[number]
                        batches = [
                            micro_batch([documents[row] for row in rows], own.token_multiple(number))
                            for rows in dealt
                        ]
                        gradients.clear()
                        took[session.iteration + 1] = number, tuple(row for rows in dealt for row in rows)
                        result = session.step(batches, votes=saver.votes() if saver else ())
                        results[result.iteration] = result
                        commits.append((result.iteration, time.time()))
                        if saver:
                            saver.settle(result.votes)
                            session.enter("saving", result.iteration)
                            saver.start(result.iteration, {})
                    if saver:
                        saver.finish()
                finally:
                    if saver:
                        saver.abandon()
                return session.shards()

            shards = elastic.run(body)
            for number, gradient in gradients.items() if shards else ():
                shards[number]["gradient"] = gradient
            strategy = elastic.program.strategy
            said = (os.getpid(), results, shards, elastic.recoveries, commits, took, strategy)
            (folder / f"{member.rank}.pickle").write_bytes(pickle.dumps(said))
            elastic.leave()

        supervisor = Supervisor(Node(plan.ranks + plan.idle_ranks), main, limits, returning=returning)
        code = supervisor.run(timeout_s)
        found = Survival(code, Outcome())
        ranks = sorted(plan.ranks + plan.idle_ranks)
        for rank in ranks:
            if (folder / f"{rank}.pid").exists():
                found.first_pids[rank] = int((folder / f"{rank}.pid").read_text())
        for number, path in checkpoints(folder / "saves").items():
            if (path / MARKER).exists():
                marker = Marker.read(path)
                assert {name: checksum(path / name) for name in marker.files} == marker.files
                found.saved.append(number)
            else:
                found.unsaved.append(path.name)
        said = {r: pickle.loads(p.read_bytes()) for r in ranks if (p := folder / f"{r}.pickle").exists()}
    results: dict[int, StepResult] = {}
    for rank, (pid, own, shards, recoveries, commits, took, _) in said.items():
        found.pids[rank], found.recoveries[rank], found.commits[rank] = pid, recoveries, commits
        found.seen[rank] = took
        for iteration, result in own.items():
            known = results.setdefault(iteration, result)
            assert (known.loss, known.grad_norm, known.lr) == (result.loss, result.grad_norm, result.lr)
        if shards:
            found.outcome.shards[rank] = shards
    for iteration in sorted(results):
        found.outcome.results.append(results[iteration])
        found.outcome.losses.append(results[iteration].loss)
        found.outcome.norms.append(results[iteration].grad_norm)
    if said:
        last = next(iter(said.values()))[6]
        left = cluster.without(set(cluster.ranks) - {*last.ranks, *last.idle_ranks})
        found.outcome.tensors = assemble(Program.build(graph, last, facts, left), found.outcome.shards)
    return found
