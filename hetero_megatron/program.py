"""The whole pure walk, run once: from a traced model and a strategy to what every rank will do (DESIGN §6).

A Program needs no process. Everything it holds can be printed, compared and tested; the runtime only carries it out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import lcm

from hetero_megatron.annotation import Annotation, AnnotationPlan
from hetero_megatron.cluster import Cluster
from hetero_megatron.comm.steps import Collective, CommPlan
from hetero_megatron.errors import ScheduleError, StrategyError
from hetero_megatron.graph.deduce import AnnotatedGraph, deduce
from hetero_megatron.graph.nodes import Graph, Kind
from hetero_megatron.graph.specialize import BoundReshard, ExecutableGraph, reshard_plans, specialize
from hetero_megatron.layout import annotate
from hetero_megatron.pipeline.action import Step
from hetero_megatron.pipeline.construct import Pipelines, check_against, construct
from hetero_megatron.pipeline.plan import Schedule, plan_forward, plan_schedule, plan_tasks
from hetero_megatron.strategy import ModelFacts, Stage, Strategy


@dataclass(frozen=True, eq=False)
class Program:
    """A model under a strategy: annotated graph, resolved Reshards, pipelines and schedule."""

    strategy: Strategy
    cluster: Cluster
    plan: AnnotationPlan
    annotated: AnnotatedGraph
    reshards: tuple[BoundReshard, ...]
    pipelines: Pipelines
    schedule: Schedule

    @staticmethod
    def build(
        graph: Graph,
        strategy: Strategy,
        facts: ModelFacts,
        cluster: Cluster,
        states: Mapping[str, Annotation] | None = None,
    ) -> "Program":
        """Check the strategy, annotate, deduce, resolve, and construct and check the pipelines.

        `states`: where optimizer states live, by parameter, such as `annotated.states` of another program of the run.

        Raises:
            HeteroError: of the room that found the fault, before any process exists.
        """
        strategy.check(facts, cluster.ranks)
        holders = {rank for annotation in (states or {}).values() for rank in annotation.ranks}
        if unused := holders - set(strategy.ranks):
            raise StrategyError(
                f"rank {min(unused)} holds optimizer states, but works in no pipeline of this strategy; strategies "
                "that share states use the same ranks"
            )
        plan = annotate(strategy, facts, graph.parameters, graph.reshards, graph.inputs, states)
        annotated = deduce(graph, plan)
        reshards = reshard_plans(annotated, cluster)
        expected = tuple(tuple(stage.ranks for stage in p.stages) for p in strategy.pipelines)
        shared = [stage.ranks for p in strategy.pipelines for stage in p.stages if len(stage.parts) > 1]
        found = construct([r.forward for r in reshards if r.forward is not None], strategy.ranks, shared)
        check_against(found, expected)
        schedule = (
            plan_tasks(
                strategy.schedule,
                [
                    (tasks, p.chunks)
                    for tasks, p in zip(strategy.schedule_tasks, strategy.pipelines, strict=True)
                ],
            )
            if strategy.schedule_tasks
            else plan_schedule(
                strategy.schedule,
                [(len(p.stages), p.micro_batches, p.chunks) for p in strategy.pipelines],
            )
        )
        return Program(strategy, cluster, plan, annotated, reshards, expected, schedule)

    def executable(self, rank: int) -> ExecutableGraph:
        """What `rank` computes and communicates (paper §6.2)."""
        return specialize(self.annotated, rank, self.cluster)

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (number, stage)
            for number, pipeline in enumerate(self.pipelines)
            for stage, ranks in enumerate(pipeline)
            for rank in ranks
        }

    def pipeline_of(self, rank: int) -> tuple[int, tuple[int, ...]]:
        """Number and all ranks, ascending, of the pipeline that `rank` belongs to."""
        if rank not in self._places:
            raise StrategyError(f"rank {rank} works in no pipeline of this strategy")
        number = self._places[rank][0]
        return number, tuple(sorted(member for stage in self.pipelines[number] for member in stage))

    def stage_of(self, rank: int) -> int:
        """Stage number of `rank` in its pipeline."""
        return self._places[rank][1]

    def part_of(self, rank: int) -> int:
        """Number of the context-parallel part of `rank` in its pipeline."""
        parts = self.stage(rank).parts
        return next(number for number, ranks in enumerate(parts) if rank in ranks)

    def stage(self, rank: int) -> Stage:
        """The stage that `rank` works on."""
        pipeline, stage = self._places[rank]
        return self.strategy.pipelines[pipeline].stages[stage]

    def reports_loss(self, rank: int) -> bool:
        """Whether `rank` is the one that reports the loss of its tokens: one in each context-parallel part."""
        number, stage = self._places[rank]
        last = stage == len(self.pipelines[number]) - 1
        return last and any(part[0] == rank for part in self.stage(rank).parts)

    def lane_of(self, rank: int) -> tuple[int, ...]:
        """The ranks with the place of `rank` in every context-parallel part: the ones Ulysses exchanges heads with."""
        parts = self.stage(rank).parts
        if self.strategy.context_parallel != "ulysses" or len(parts) == 1:
            return ()
        return next(lane for lane in zip(*parts, strict=True) if rank in lane)

    def token_multiple(self, pipeline: int, part: int | None = None) -> int:
        """What a part's tokens of a micro-batch must divide by: sequence parallelism cuts them over every stage's TP.

        Without `part`, what a whole micro-batch is padded to: several parts pad their own tokens each.
        """
        stages = self.strategy.pipelines[pipeline].stages
        if not self.strategy.sequence_parallel or (part is None and stages[0].context_parallel_size > 1):
            return 1
        return lcm(*(stage.tensor_parallel_sizes[part or 0] for stage in stages))

    def actions(self, rank: int, micro_batches: int) -> tuple[Step, ...]:
        """The steps of `rank` in a step with this many micro-batches in its pipeline.

        Raises:
            ScheduleError: the schedule is one of a file, for another count.
        """
        pipeline, stage = self._places[rank]
        own = self.strategy.pipelines[pipeline]
        if not self.strategy.schedule_tasks:
            schedule = _schedule(self.strategy.schedule, len(own.stages), micro_batches, own.chunks)
            return schedule.steps(0, stage)
        if micro_batches != own.micro_batches:
            raise ScheduleError(
                f"schedule {self.strategy.schedule}: pipeline {pipeline} runs {own.micro_batches} micro-batches there, "
                f"and {micro_batches} in this step; a schedule of a file is for one count"
            )
        return self.schedule.steps(pipeline, stage)

    def forward_actions(self, rank: int, micro_batches: int) -> tuple[Step, ...]:
        """The steps of `rank` in an evaluation of this many micro-batches (0 too) in its pipeline."""
        pipeline, stage = self._places[rank]
        own = self.strategy.pipelines[pipeline]
        return _forward_schedule(len(own.stages), micro_batches, own.chunks).steps(0, stage)

    @cached_property
    def posts(self) -> dict[str, CommPlan]:
        """Per parameter, how its gradient reaches the layout of its optimizer states."""
        return self.annotated.post_plans(self.cluster)

    @cached_property
    def pres(self) -> dict[str, CommPlan]:
        """Per parameter, how it is made from the layout of its optimizer states."""
        return self.annotated.pre_plans(self.cluster)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Every rank tuple that some collective of this program uses, sorted."""
        plans: list[CommPlan] = [
            *self.pres.values(),
            *self.posts.values(),
            *self.annotated.edge_plans(self.cluster).values(),
        ]
        plans += [
            plan
            for reshard in self.reshards
            for plan in (reshard.forward, reshard.backward)
            if plan is not None
        ]
        found = _collective_groups(plans)
        for node in self.annotated.graph.nodes:
            if node.kind is Kind.COMPUTE and node.signature is not None and node.signature.reduced:
                found |= set(split_groups(self.annotated.values[node.inputs[0]], 1))
        found |= {lane for rank in self.strategy.ranks if (lane := self.lane_of(rank))}
        return tuple(sorted(found))

    @property
    def control_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each pipeline, sorted."""
        return tuple(
            sorted(tuple(sorted(r for stage in pipeline for r in stage)) for pipeline in self.pipelines)
        )


@lru_cache(maxsize=256)
def _schedule(name: str, stages: int, micro_batches: int, chunks: int) -> Schedule:
    return plan_schedule(name, [(stages, micro_batches, chunks)])


@lru_cache(maxsize=256)
def _forward_schedule(stages: int, micro_batches: int, chunks: int) -> Schedule:
    return plan_forward([(stages, micro_batches, chunks)])


def _collective_groups(plans: Iterable[CommPlan]) -> set[tuple[int, ...]]:
    distinct = {id(plan): plan for plan in plans}.values()
    steps = (step for plan in distinct for stage in plan.stages for step in stage.steps)
    return {step.ranks for step in steps if isinstance(step, Collective)}


def split_groups(annotation: Annotation, dim: int) -> Sequence[tuple[int, ...]]:
    """The ranks that together hold `dim`: equal in every other coordinate, in order along `dim`."""
    found = []
    for subgroup, states in enumerate(annotation.states):
        together: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for index, rank in enumerate(annotation.groups[subgroup]):
            rest = tuple((d, place) for d, place in states.coord(index).items() if d != dim)
            together.setdefault(rest, []).append(rank)
        found += [tuple(ranks) for ranks in together.values() if len(ranks) > 1]
    return found
