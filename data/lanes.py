"""What dispatch knows of pipelines: what their micro-batches hold, and what work costs there (paper §8, dispatch)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetero_megatron.errors import DataError
from hetero_megatron.program import Program

Cost = Callable[[int, Sequence[int]], float]
"""Seconds, or any unit of time, that a pipeline takes for a micro-batch with documents of these lengths."""


@dataclass(frozen=True, slots=True)
class Lane:
    """What dispatch knows of one pipeline.

    Attributes:
        micro_batches: how many to aim at; more are opened where the capacity demands it. 0: the pipeline gets nothing.
        capacity: the most tokens of a micro-batch, filler included.
        weight: its share of the work, relative to the other pipelines.
        multiple: the tokens of a micro-batch are filled up to a multiple of this.
    """

    micro_batches: int
    capacity: int
    weight: float = 1.0
    multiple: int = 1

    def __post_init__(self) -> None:
        if self.micro_batches < 0 or self.capacity < 1 or self.multiple < 1 or not self.weight >= 0:
            raise DataError(
                f"a pipeline with {self.micro_batches} micro-batches of {self.capacity} tokens, filled up to a "
                f"multiple of {self.multiple}, and weight {self.weight:g} cannot take documents; sizes are positive"
            )

    def filled(self, tokens: int) -> int:
        """Tokens of a micro-batch with `tokens` real ones."""
        return tokens + -tokens % self.multiple

    def holds(self, tokens: int) -> bool:
        """Whether a micro-batch of `tokens` real tokens, filled up, is within the capacity."""
        return self.micro_batches > 0 and self.weight > 0 and self.filled(tokens) <= self.capacity


def lanes_of(program: Program, seq_length: int) -> tuple[Lane, ...]:
    """A strategy's pipelines: each takes work by its micro_batches, times what each of them holds.

    That is micro_batch_size * seq_length tokens, or max_tokens if these are fewer, filled up as rows would be.

    Raises:
        DataError: the strategy's schedule is for one count of micro-batches only.
    """
    if program.strategy.schedule_tasks:
        raise DataError(
            f"packing: documents makes another number of micro-batches in every step, and schedule "
            f"{program.strategy.schedule} of a file is for one number; use packing: rows, or a schedule by name"
        )
    found = []
    for number, pipeline in enumerate(program.strategy.pipelines):
        multiple = program.token_multiple(number)
        tokens = pipeline.tokens(seq_length)
        weight = pipeline.micro_batches * tokens / seq_length
        found.append(Lane(pipeline.micro_batches, tokens + -tokens % multiple, weight, multiple))
    return tuple(found)


def flop_cost(linear: float, quadratic: float, lanes: Sequence[Lane]) -> Cost:
    """FLOPs of a micro-batch over the pipeline's weight: `linear` per token, `quadratic` per squared document length.

    A Llama has linear = flops_per_token(config, 0) and linear + quadratic = flops_per_token(config, 1).
    """
    weights = [lane.weight for lane in lanes]

    def cost(pipeline: int, lengths: Sequence[int]) -> float:
        tokens, squares = sum(lengths), sum([length * length for length in lengths])
        return (linear * tokens + quadratic * squares) / weights[pipeline]

    return cost
