"""The one owner of mutable things: processes, shards, optimizer, and the step (DESIGN §6).

A Session turns a Program, which is pure, into work: it creates the groups, cuts the parameters, binds the
Reshards and then runs the schedule's actions, one step after the other.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetero_megatron.errors import RuntimeFailure
from hetero_megatron.pipeline.action import Action, Step
from hetero_megatron.program import Program
from hetero_megatron.runtime.agree import agree_on_micro_batches
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.bind import BoundStage, Sharing
from hetero_megatron.runtime.binding import Kernels
from hetero_megatron.runtime.clock import KINDS, Clock
from hetero_megatron.runtime.copies import Copies
from hetero_megatron.runtime.learning_rate import learning_rate
from hetero_megatron.runtime.optimizer import (
    AdamKernel,
    OptimizerSettings,
    clip_factor,
    fused_adamw,
    squared_norm,
    update,
)
from hetero_megatron.runtime.state import BUCKET_ELEMENTS, ParameterSlot, State, view
from hetero_megatron.runtime.sync import GradientSync, ParameterGather
from hetero_megatron.runtime.world import Groups, World

GradientHook = Callable[[ParameterSlot, Tensor, float], None]
PhaseHook = Callable[[str, int], None]
Agreed = tuple[int, tuple[float, ...]]
"""A step that counts, and the numbers that its ranks have agreed on."""

_PHASES = {"F": "forward", "B": "backward"}


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did; losses and norms are those of the whole step over all pipelines, equal on every rank.

    Attributes:
        loss: mean over the valid targets, 0 when there are none.
        grad_norm: global norm before clipping; nan or inf when a gradient was not finite.
        skipped: why no update was made, or "".
        seconds: wall time of this rank's `step`, and how much of it all ranks together spend on average in
            `compute`, in `communication` and in `bubble` (waiting for a stage); never more than `step`.
        votes: the votes of all ranks added up, equal on every rank.
    """

    iteration: int
    loss: float
    grad_norm: float
    lr: float
    valid_tokens: int
    skipped: str
    seconds: Mapping[str, float]
    votes: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of this rank's forward and backward passes in a step: computing alone, and with collectives inside."""

    compute: float = 0.0
    whole: float = 0.0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean loss over `valid_tokens` targets of all pipelines, 0 when there are none; equal on every rank."""

    loss: float
    valid_tokens: int

    @staticmethod
    def of(parts: Sequence["Evaluation"]) -> "Evaluation":
        """Several evaluations as one: every target weighs the same.

        >>> Evaluation.of([Evaluation(2.0, 30), Evaluation(4.0, 10)])
        Evaluation(loss=2.5, valid_tokens=40)
        """
        tokens = sum(part.valid_tokens for part in parts)
        loss_sum = math.fsum(part.loss * part.valid_tokens for part in parts if part.valid_tokens)
        return Evaluation(loss_sum / tokens if tokens else 0.0, tokens)


class Session:
    """A running program on this rank."""

    def __init__(
        self,
        program: Program,
        world: World,
        modules: Mapping[str, nn.Module],
        initial: Callable[[ParameterSlot], Tensor] | None,
        settings: OptimizerSettings,
        dtype: torch.dtype = torch.float32,
        kernels: Kernels | None = None,
        bucket_elements: int = BUCKET_ELEMENTS,
        groups: Groups | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        """Collective over all ranks: create groups, cut parameters, bind Reshards.

        `modules` are the model's leaves by node name; `initial` gives the initial value of a local shard; `kernels`
        are the run's choice by operator (`attention`, `rms_norm`, `cross_entropy`, `adam`), torch's where left out.
        Gradients and parameters travel in buckets of about `bucket_elements` elements of the full tensors.

        Without `initial` the session has no memory until `start` or a switch fills it. With `groups`, made by all processes
        before, nothing is created here, and only the strategy's ranks make the session. With `sharing`, sessions of
        several programs have their optimizer states in common.
        """
        kernels = kernels or {}
        self.groups = groups or Groups.of(world, [program])
        self.world = world = self.groups.within(program.strategy.ranks)
        self.program, self.settings, self.dtype = program, settings, dtype
        self.clock = Clock()
        self.stage = BoundStage(
            program,
            world,
            self.groups,
            modules,
            dtype,
            self.clock,
            kernels,
            bucket_elements,
            sharing,
        )
        self.state: State = self.stage.state
        self.sync = GradientSync(self.state, world, self.groups, self.stage.uses)
        self.gather = ParameterGather(self.state, world, self.groups, self.stage.first_users, self.clock)
        self.iteration = 0
        self.skipped_iterations = 0
        # Of the latest step, on the host's clock.
        self.passes = Passes()
        self.gradient_hook: GradientHook | None = None
        # Told of every phase of a step (`runtime.board.PHASES`) as it begins, with the iteration.
        self.phase_hook: PhaseHook | None = None
        # What the ranks have agreed on in the last step that this rank knows to count.
        self.agreed: Agreed | None = None
        # Copies of shards that are in danger, if this run keeps any.
        self.copies: Copies | None = None
        self.adam: AdamKernel = kernels.get("adam", fused_adamw)
        if initial is None:
            self.state.release(*self.state.flats)
        else:
            self.start(initial)

    def start(self, initial: Callable[[ParameterSlot], Tensor]) -> None:
        """Collective over the strategy's ranks: fill a session that has no memory with the values of a new run."""
        self.state.hold()
        self.state.initialise(initial)
        self.gather.start()

    def step(
        self, batches: Sequence[MicroBatch], skip_nonfinite: bool = True, votes: Sequence[float] = ()
    ) -> StepResult:
        """Run one step on this pipeline's micro-batches and update the weights.

        Every rank of a pipeline passes the same micro-batches. The gradient is that of the sum of token losses
        over all pipelines divided by all valid targets of the step, whatever the micro-batch counts.

        `votes` are numbers about which the ranks have to agree, such as 1 on a rank that was asked to stop. They
        travel with the step's other numbers, and their sums are in the result; all ranks pass equally many.

        Raises:
            GraphError: a micro-batch's tokens do not divide as the strategy cuts them (A.2).
            ScheduleError: the schedule is one of a file, for other counts of micro-batches.
            RuntimeFailure: ranks of a pipeline disagree on the micro-batches, a gradient is not finite and
                `skip_nonfinite` is off, a peer is gone, or the run has switched to another session.
        """
        self._check_held()
        began = time.perf_counter()
        self.clock.reset()
        whole, batches = batches, self.stage.own_tokens(batches)
        self.stage.check_sizes(batches)
        actions = self.program.actions(self.world.rank, len(batches))
        mark = self.clock.mark()
        agree_on_micro_batches(self.program, self.world, self.groups, whole)
        self.clock.span("agree", "sizes", mark)
        self.state.zero_gradient()
        self.sync.begin()
        loss_sum = self._run_schedule(actions, batches)
        at = time.perf_counter()
        self.passes = Passes(self.clock.seconds["compute"], self.clock.passes)
        self.enter("gradient sync")
        mark = self.clock.mark() if self.sync.is_needed else None
        self.sync.finish()
        self.clock.span("reduce", "gradients", mark)
        self.clock.add("communication", at)
        return self._finish(loss_sum, self._valid_tokens(batches), began, skip_nonfinite, votes)

    def take_back(self) -> None:
        """Uncount the step just made, which was skipped: weights, moments and counters are those before it."""
        self.iteration -= 1
        self.skipped_iterations -= 1

    def evaluate(self, batches: Sequence[MicroBatch]) -> Evaluation:
        """The loss of this pipeline's micro-batches and those of the others, without a backward pass or an update.

        Collective over all ranks. Every rank of a pipeline passes the same micro-batches; pipelines may have
        different numbers of them, and none. Weights, gradients, moments and counters stay as they are.

        Raises:
            GraphError: a micro-batch's tokens do not divide as the strategy cuts them (A.2).
            RuntimeFailure: ranks of a pipeline disagree on the micro-batches, a peer is gone, or the run has
                switched to another session.
        """
        self._check_held()
        whole, batches = batches, self.stage.own_tokens(batches)
        self.stage.check_sizes(batches)
        actions = self.program.forward_actions(self.world.rank, len(batches))
        agree_on_micro_batches(self.program, self.world, self.groups, whole)
        self.gather.finish()
        self.enter("evaluation", self.iteration)
        with torch.no_grad():
            loss_sum = self._run_schedule(actions, batches)
        numbers = torch.cat([self._valid_tokens(batches), loss_sum.reshape(1)])
        count, loss = self._all_sum(numbers)
        return Evaluation(loss / count if count else 0.0, int(count))

    def _check_held(self) -> None:
        if not self.state.is_held:
            raise RuntimeFailure(
                f"rank {self.world.rank}: this session has no memory, its state is with the session that the run has "
                "switched to"
            )

    def _run_schedule(self, actions: Sequence[Step], batches: Sequence[MicroBatch]) -> Tensor:
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.world.device)
        # The last backward pass of each chunk, after which its gradients are complete.
        last = {item.chunk: item for item in actions if isinstance(item, Action) and item.kind == "B"}
        for item in actions:
            if isinstance(item, Action):
                if torch.is_grad_enabled():
                    self.enter(_PHASES[item.kind[0]])
                is_last = last.get(item.chunk) is item
                names = self.stage.parameters_of(item.chunk) if is_last else ()
                with self.sync.last_backward(names) if names else nullcontext():
                    loss = self.stage.compute(item, batches)
                if loss is not None:
                    loss_sum += loss
            else:
                self.stage.communicate(item, batches)
        self.stage.drain()
        # Every tensor-parallel rank of a last stage has the same loss; one of them reports it.
        return loss_sum if self.program.reports_loss(self.world.rank) else torch.zeros_like(loss_sum)

    def _valid_tokens(self, batches: Sequence[MicroBatch]) -> Tensor:
        """[1], FP64, on the device, which nobody waits for before the end of the step."""
        count = torch.zeros(1, dtype=torch.float64, device=self.world.device)
        for batch in batches if self.program.reports_loss(self.world.rank) else ():
            count += batch.valid_tokens
        return count

    def _finish(
        self, loss_sum: Tensor, count: Tensor, began: float, skip_nonfinite: bool, votes: Sequence[float]
    ) -> StepResult:
        """Agree on the step's numbers, then update everywhere or nowhere."""
        if self.gradient_hook is not None:
            (divisor,) = self._all_sum(count.clone())
            for slot in self.state.slots:
                self.gradient_hook(slot, view(self.state.gradient, slot), divisor)
        at, mark = time.perf_counter(), self.clock.mark()
        numbers = torch.stack([count[0], loss_sum, squared_norm(self.state).to(count.device)])
        self.clock.span("update", "update", mark)
        self.clock.add("compute", at)
        if self.copies is not None:
            at, mark = time.perf_counter(), self.clock.mark()
            self.copies.exchange()
            self.clock.span("copies", "copies", mark)
            self.clock.add("communication", at)
        elapsed = time.perf_counter() - began
        own = numbers.new_tensor([elapsed, *(self.clock.seconds[kind] for kind in KINDS), *votes])
        self.enter("agreement")
        mark = self.clock.mark()
        agreed = tuple(self._all_sum(torch.cat([numbers, own])))
        self.clock.span("agree", "norm", mark)
        # From here on the step counts: every rank has its synchronised gradients, and a rank alone could go on.
        self.agreed = (self.iteration + 1, agreed)
        result = self._update(agreed, began, skip_nonfinite, self._blame)
        if not result.skipped:
            at = time.perf_counter()
            self.enter("parameter gather", self.iteration)
            self.gather.start()
            self.clock.add("communication", at)
        self.enter("between two steps")
        return result

    def complete(self, agreed: Sequence[float]) -> StepResult:
        """Make the update of a step that other ranks know to count, with the numbers that were agreed on; local.

        For a rank that has lost its peers while it waited for these numbers. Parameters are not made anew.
        """
        self.agreed = (self.iteration + 1, tuple(agreed))
        return self._update(agreed, time.perf_counter(), True, _unknown_fault)

    def let_go(self) -> None:
        """Forget everything that holds a connection; `complete` and to move the state elsewhere is what is left."""
        for name in ("stage", "sync", "gather", "groups", "world"):
            delattr(self, name)
        if self.copies is not None:
            self.copies.let_go()

    def _update(
        self, agreed: Sequence[float], began: float, skip_nonfinite: bool, blame: Callable[[float], str]
    ) -> StepResult:
        """Everything behind the agreement that needs nobody, but for the search for the origin of a nan."""
        iteration = self.iteration + 1
        self.enter("committed", iteration)
        divisor, loss_total, squares, whole, *others = agreed
        parts, voted = others[: len(KINDS)], tuple(others[len(KINDS) :])
        norm = (squares**0.5) / divisor if divisor else 0.0
        loss = loss_total / divisor if divisor else 0.0
        lr = learning_rate(self.settings, iteration)
        skipped = ""
        if not divisor:
            skipped = "0 tokens: nothing to predict in this step"
        elif not (math.isfinite(norm) and math.isfinite(loss)):
            skipped = blame(loss)
            if not skip_nonfinite:
                self.iteration = iteration
                raise RuntimeFailure(f"iteration {iteration}: {skipped}; no rank has updated its weights")
        if skipped:
            self.skipped_iterations += 1
        else:
            at, mark = time.perf_counter(), self.clock.mark()
            scale = divisor / clip_factor(norm, self.settings.clip_grad)
            self.enter("update", iteration)
            update(self.state, self.settings, lr, scale, self.adam)
            if self.copies is not None:
                self.copies.update(lr, scale)
            self.clock.span("update", "update", mark)
            self.clock.add("compute", at)
        self.iteration = iteration
        step = time.perf_counter() - began
        # Shares of all ranks' time: one that waits for this one to begin has been in the step for longer.
        seconds = {kind: step * part / whole for kind, part in zip(KINDS, parts, strict=True)} | {
            "step": step
        }
        return StepResult(iteration, loss, norm, lr, int(divisor), skipped, seconds, voted)

    def enter(self, phase: str, iteration: int | None = None) -> None:
        """Say that a phase of a step begins."""
        if self.phase_hook is not None:
            self.phase_hook(phase, self.iteration + 1 if iteration is None else iteration)

    def _all_sum(self, values: Tensor) -> list[float]:
        if len(self.world.ranks) > 1:
            at = time.perf_counter()
            dist.all_reduce(values, group=self.world.group)
            self.clock.add("communication", at)
        numbers: list[float] = values.tolist()
        return numbers

    def _blame(self, loss: float) -> str:
        """Which rank has a gradient that is not finite, and in which parameter; the same text on every rank."""
        bad = next(
            (s.name for s in self.state.slots if not torch.isfinite(view(self.state.gradient, s)).all()),
            None,
        )
        found: list[str | None] = [None] * len(self.world.ranks)
        if len(self.world.ranks) > 1:
            dist.all_gather_object(found, bad, group=self.world.control)
        else:
            found = [bad]
        names = [f"rank {rank} ({name})" for rank, name in zip(self.world.ranks, found, strict=True) if name]
        if names:
            return "gradient not finite on " + ", ".join(names)
        if math.isfinite(loss):
            return "the gradient norm is beyond FP32, though every gradient element is finite"
        return "the loss is not finite"

    @cached_property
    def gather_bytes(self) -> dict[int, int]:
        """What every rank sends to make the parameters from the states; ranks that send nothing are absent."""
        shapes = self.program.annotated.graph
        found: Counter[int] = Counter()
        for name, plan in self.program.pres.items():
            found.update(plan.bytes_sent(shapes.parameter_shape(name), self.dtype.itemsize))
        return {rank: sent for rank, sent in found.items() if sent}

    def shards(self) -> dict[str, dict[str, Tensor]]:
        """Local shards by parameter name: `parameter` in its layout; FP32 `master`, `gradient`, `exp_avg`, `exp_avg_sq`
        in the layout of its states."""
        self._check_held()
        self.gather.finish()
        state = self.state
        found = {
            slot.name: {"parameter": view(state.compute, slot).clone()} for slot in state.parameter_slots
        }
        flats = {"master": state.master, "gradient": state.gradient} | state.moments
        for slot in state.slots:
            found.setdefault(slot.name, {}).update(
                {kind: view(flat, slot).clone() for kind, flat in flats.items()}
            )
        return found


def _unknown_fault(loss: float) -> str:
    """Why a step is skipped, on a rank that cannot ask the others."""
    return "the loss or the gradient norm is not finite" if math.isfinite(loss) else "the loss is not finite"
