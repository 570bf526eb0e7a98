"""The `elastic` section of a recipe: what a run does about lost ranks, with `pretrain --elastic`."""

from typing import Annotated, Literal

from pydantic import Field

from hetero_megatron.recipe_sections import Count, Section
from hetero_megatron.runtime.board import StepPhase

Seconds = Annotated[float, Field(gt=0, strict=False)]


class FaultSection(Section):
    """A fault on purpose, for tests and demonstrations.

    `kind` happens to `rank` when it comes to `phase` of step `iteration` for the `occurrence`-th time; `seconds` is the
    length of a `delay`. A `slow` rank takes `factor` times as long for every pass from then on.
    """

    kind: Literal["kill", "stop", "delay", "drop", "slow"]
    rank: Annotated[int, Field(ge=0)]
    iteration: Annotated[int, Field(ge=0)]
    phase: StepPhase
    occurrence: Count = 1
    seconds: Seconds = 1.0
    factor: Annotated[float, Field(ge=1, strict=False)] = 4.0


class ElasticSection(Section):
    """What keeps a run going when ranks are lost.

    `copies`: what a rank alone holds of the optimizer's states is kept by another one, too.
    `returning`: a lost rank is started anew and taken in at the end of a step.
    `heartbeat_s`: a rank without a sign of life for so long is ended; `phase_s`: one that stays in one place of a step.
    `timeout_s`: how long one message may take. `faults`: what is to go wrong.
    `plans`: YAML files with a `strategy` section, as `plan -o` writes them or whole recipes; each takes over when
    exactly its ranks are there. `replan`: who makes the strategy for other ranks: the planner, or the recipe's own
    strategy is kept without the ranks that are gone.
    `stragglers`: when a plan for the measured speeds of the ranks makes steps more than `straggler_gain` faster, it is
    written to the run's folder (`propose`), or taken as well (`replan`); only `replan` needs an elastic run.
    """

    copies: bool = True
    returning: bool = False
    heartbeat_s: Seconds = 5.0
    phase_s: Seconds = 600.0
    timeout_s: Seconds = 60.0
    faults: tuple[FaultSection, ...] = Field(default=(), strict=False)
    replan: Literal["planner", "keep"] = "planner"
    plans: tuple[str, ...] = Field(default=(), strict=False)
    stragglers: Literal["ignore", "propose", "replan"] = "ignore"
    straggler_gain: Annotated[float, Field(ge=0, strict=False)] = 0.1
