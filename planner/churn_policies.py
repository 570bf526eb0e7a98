"""What systems do when devices go and come: re-plan and move, restart from checkpoints, or fall back on templates.

Limits of the others are those that they document; their plans come from the same cost model as ours (`baselines`).
"""

from dataclasses import dataclass, fields, replace

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.churn import Answer, Policy, Ranks, Work
from hetero_megatron.planner.churn_plans import Plans, ShapePlans
from hetero_megatron.planner.movement import STATE_BYTES
from hetero_megatron.planner.plan import Plan
from hetero_megatron.planner.rates import bytes_per_second
from hetero_megatron.planner.replan import replan
from hetero_megatron.planner.survival import lost_layers
from hetero_megatron.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of a recovery in the surviving processes, besides the move of the state.

    `resume`: from the end of the recovery to the start of the next step.
    """

    detect: float
    agree: float
    plan: float
    specialize: float
    groups: float
    resume: float

    @property
    def total(self) -> float:
        """Of a loss."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def without_loss(self) -> float:
        """Between two steps, when nobody is lost."""
        return self.total - self.detect


@dataclass(frozen=True, slots=True)
class Starting:
    """Seconds of a start: processes and communication, reading a checkpoint, and writing one."""

    launch: float
    read: float
    write: float


@dataclass(frozen=True)
class Ours(Policy):
    """Re-plans for whoever is there, with all of them, and moves the state between the ranks.

    Without ZeRO and in two pipelines or more, as the paper does it (§9 b). `horizon`: seconds until the next change, as
    far as one can know.
    """

    plans: Plans
    phases: Phases
    starting: Starting
    horizon: float

    def concerned(self, work: Work, lost: Ranks) -> bool:
        """Idle ranks belong to the run as well."""
        return bool(lost & (work.ranks | set(work.strategy.idle_ranks)))

    def begin(self, present: Ranks) -> Answer:
        """With the plan for these devices."""
        work = self.plans.of(present).redundant if present else None
        return Answer(work, self.starting.launch + self.starting.read, True)

    def lose(self, present: Ranks, work: Work) -> Answer:
        """From the living owners; from a checkpoint where a layer has none."""
        found = self._found(present, work)
        if found is None:
            return self.begin(present)
        return Answer(found[0], self.phases.total + found[1])

    def join(self, present: Ranks, work: Work) -> Answer | None:
        """Always, as the runtime does it."""
        found = self._found(present, work)
        return None if found is None else Answer(found[0], self.phases.without_loss + found[1])

    def _found(self, present: Ranks, work: Work) -> tuple[Work, float] | None:
        """The next work and the seconds of the move."""
        key, known = (present, work, self.horizon), self.plans.replanned
        if key not in known:
            known[key] = self._replanned(present, work)
        return known[key]

    def _replanned(self, present: Ranks, work: Work) -> tuple[Work, float] | None:
        plan = self.plans.plan
        absent = set(plan.problem.cluster.ranks) - present
        if not present:
            return None
        # Drafts of the plan for this shape, which was made ahead, besides those of the first plan.
        kept: Plan = replace(plan, found=(*self.plans.of(present).drafts, *plan.found))
        try:
            found = replan(kept, absent, running=work.strategy, horizon_seconds=self.horizon)
        except PlannerError:
            return None
        return Work(found.best.strategy, found.best.seconds), found.switch_seconds


def _pays(work: Work, other: Work, pause: float, horizon: float) -> bool:
    """Whether more steps are made up to the next change with the other work, after a pause."""
    return (horizon - pause) / other.step_seconds > horizon / work.step_seconds


@dataclass(frozen=True)
class Restart(Policy):
    """Ends all processes and starts anew from the newest checkpoint; takes more devices in when that pays.

    `plan` names which of `ShapePlans` it runs: `even`, as Megatron does, or `fastest`.
    """

    plans: Plans
    starting: Starting
    horizon: float
    plan: str = "even"

    def concerned(self, work: Work, lost: Ranks) -> bool:
        """Devices that it does not use may go."""
        return bool(lost & work.ranks)

    def begin(self, present: Ranks) -> Answer:
        """With the plan for these devices."""
        return Answer(self._work(present), self.starting.launch + self.starting.read, True)

    def lose(self, present: Ranks, work: Work) -> Answer:
        """The same: nothing is left."""
        del work
        return self.begin(present)

    def join(self, present: Ranks, work: Work) -> Answer | None:
        """A checkpoint first, so that nothing is lost."""
        other, pause = self._work(present), sum(getattr(self.starting, f.name) for f in fields(self.starting))
        if other is None or not _pays(work, other, pause, self.horizon):
            return None
        return Answer(other, pause, True, self.starting.write)

    def _work(self, present: Ranks) -> Work | None:
        if not present:
            return None
        found: ShapePlans = self.plans.of(present)
        return found.fastest if self.plan == "fastest" else found.even


@dataclass(frozen=True)
class Templates(Policy):
    """Oobleck's: whole nodes, pipelines from templates, no restart while each layer has a living owner.

    A node that has lost a device is given up. What a pipeline lacks is broadcast from the first living owner, layer by
    layer. The other phases of a recovery take what ours take.
    """

    plans: Plans
    phases: Phases
    starting: Starting
    horizon: float

    def concerned(self, work: Work, lost: Ranks) -> bool:
        """Nodes that it does not use may go."""
        return bool(lost & work.ranks)

    def begin(self, present: Ranks) -> Answer:
        """From a checkpoint."""
        work = self.plans.of(present).templates if present else None
        return Answer(work, self.starting.launch + self.starting.read, True)

    def lose(self, present: Ranks, work: Work) -> Answer:
        """The pipelines are made anew from templates."""
        other = self.plans.of(present).templates if present else None
        layers = self.plans.full.config.num_layers
        if other is None or lost_layers(work.strategy, layers, work.ranks - present):
            return self.begin(present)
        return Answer(other, self.phases.total + self._move(work, other, present))

    def join(self, present: Ranks, work: Work) -> Answer | None:
        """When that pays."""
        other = self.plans.of(present).templates
        if other is None:
            return None
        pause = self.phases.without_loss + self._move(work, other, present)
        return Answer(other, pause) if _pays(work, other, pause, self.horizon) else None

    def _move(self, work: Work, other: Work, present: Ranks) -> float:
        cluster = self.plans.full.cluster
        layer = self.plans.costs.work.layer_parameters * STATE_BYTES
        return broadcast_seconds(work.strategy, other.strategy, present, layer, cluster)


def broadcast_seconds(
    before: Strategy, after: Strategy, present: Ranks, layer_bytes: float, cluster: Cluster
) -> float:
    """Layers that someone lacks, each sent by all ranks of the first living stage that has it; the busiest sets the time."""
    had = {
        (rank, layer): (place, len(stage.ranks))
        for pipeline in before.pipelines
        for stage in pipeline.stages
        for layer in stage.layer_numbers
        for place, rank in enumerate(stage.ranks)
    }
    missing: dict[int, None] = {}
    for pipeline in after.pipelines:
        for stage in pipeline.stages:
            for layer in stage.layer_numbers:
                if any(
                    had.get((rank, layer)) != (place, len(stage.ranks))
                    for place, rank in enumerate(stage.ranks)
                ):
                    missing[layer] = None
    sent: dict[int, float] = {}
    for layer in missing:
        owner = next(
            (
                stage
                for pipeline in before.pipelines
                for stage in pipeline.stages
                if layer in stage.layer_numbers and present.issuperset(stage.ranks)
            ),
            None,
        )
        for rank in owner.ranks if owner is not None else ():
            sent[rank] = sent.get(rank, 0.0) + layer_bytes / len(owner.ranks)  # type: ignore[union-attr]
    return max(sent.values(), default=0.0) / bytes_per_second(cluster.inter_node)
