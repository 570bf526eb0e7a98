"""A run of one pipeline's actions without devices, in which every send waits for its receiver (paper A.2)."""

from dataclasses import dataclass

from hetero_megatron.pipeline.action import Action, Step
from hetero_megatron.pipeline.grid import Cell, render
from hetero_megatron.pipeline.lower import PipelineActions


@dataclass(frozen=True, slots=True)
class DryRun:
    """How far every stage came: its compute actions by tick, and the number of steps it finished."""

    actions: PipelineActions
    cells: tuple[tuple[Cell, ...], ...]
    finished: tuple[int, ...]

    @property
    def stuck(self) -> tuple[int, ...]:
        """The stages that did not finish; none if the schedule cannot hang."""
        stages = self.actions.stages
        return tuple(stage for stage, steps in enumerate(stages) if self.finished[stage] < len(steps))

    def explain(self) -> str:
        """Who waits for whom, followed by the grid of what ran."""
        chain, seen, stage = [], set[int](), self.stuck[0]
        while stage not in seen:
            seen.add(stage)
            if self.finished[stage] == len(self.actions.stages[stage]):
                chain.append("has finished")
                break
            item, peer = min(self._unmatched(stage), key=lambda found: found[0].is_send)
            chain.append(
                f"waits to send {item.payload} to stage {peer}"
                if item.is_send
                else f"waits for {item.payload} from stage {peer}"
            )
            stage = peer
        remarks = [
            f"{self.actions.stages[stage][self.finished[stage]]} <-- stuck here"
            if stage in self.stuck
            else ""
            for stage in range(len(self.cells))
        ]
        return f"deadlock: stage {self.stuck[0]} {', which '.join(chain)}\n{render(self.cells, remarks)}"

    def _unmatched(self, stage: int) -> list[tuple[Action, int]]:
        posted = _posted(self.actions, self.finished)
        found: list[tuple[Action, int]] = []
        for item in _items(self.actions.stages[stage], self.finished[stage]):
            peer = self.actions.boundaries.peer(stage, item)
            assert peer is not None, f"{item} of stage {stage} has a peer: check_messages saw it"
            if peer not in posted:
                found.append((item, peer[0]))
        return found


def dry_run(actions: PipelineActions) -> DryRun:
    """Run all stages with synchronous sends: a batch is done once both ends of all its items are posted."""
    stages = actions.stages
    finished = [0] * len(stages)
    cells: list[list[Cell]] = [[] for _ in stages]
    posted: set[tuple[int, Action]] = set()
    tick = 0
    while True:
        _communicate(actions, finished, posted)
        ready = [
            stage
            for stage, steps in enumerate(stages)
            if finished[stage] < len(steps) and isinstance(steps[finished[stage]], Action)
        ]
        for stage in ready:
            action = stages[stage][finished[stage]]
            assert isinstance(action, Action), "ready stages stand before a compute action"
            cells[stage].append((tick, 1, action))
            finished[stage] += 1
        if not ready:
            return DryRun(actions, tuple(map(tuple, cells)), tuple(finished))
        tick += 1


def _communicate(actions: PipelineActions, finished: list[int], posted: set[tuple[int, Action]]) -> None:
    """Complete batches until none can be completed."""
    moved = True
    while moved:
        moved = False
        for stage, steps in enumerate(actions.stages):
            posted.update((stage, item) for item in _items(steps, finished[stage]))
        for stage, steps in enumerate(actions.stages):
            items = _items(steps, finished[stage])
            if items and all(actions.boundaries.peer(stage, item) in posted for item in items):
                finished[stage] += 1
                moved = True


def _items(steps: tuple[Step, ...], number: int) -> tuple[Action, ...]:
    """The communication that a stage posts in step `number`."""
    if number >= len(steps):
        return ()
    step = steps[number]
    return () if isinstance(step, Action) else step.items


def _posted(actions: PipelineActions, finished: tuple[int, ...]) -> set[tuple[int, Action]]:
    return {
        (stage, item)
        for stage, steps in enumerate(actions.stages)
        for number in range(finished[stage] + 1)
        for item in _items(steps, number)
    }
