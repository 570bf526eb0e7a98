"""Steps as a corpus would give them, drawn by seed: what strategies for mixed lengths are planned on (paper A.1, c)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.errors import PlannerError

Lengths = NDArray[np.int64]
SEED = 1234


@dataclass(frozen=True, slots=True, eq=False)
class LengthSample:
    """Steps of documents, each at most `context` tokens long.

    Attributes:
        steps: the lengths of each step's documents.
        context: longer documents were cut to so many tokens.
        tokens_per_step: the most tokens of a step.
    """

    steps: tuple[Lengths, ...]
    context: int
    tokens_per_step: int

    @staticmethod
    def draw(
        lengths: Lengths, context: int, tokens_per_step: int, steps: int, seed: int = SEED
    ) -> "LengthSample":
        """Steps of as many documents as fit, drawn from all documents with the same chance.

        Raises:
            PlannerError: no document, one of no tokens, or sizes that are not positive.
        """
        sizes = np.asarray(lengths, dtype=np.int64)
        if not len(sizes) or sizes.min() < 1:
            told = "there is none" if not len(sizes) else f"one has {int(sizes.min())} tokens"
            raise PlannerError(
                f"lengths of documents are needed to plan for them: {told}; give lengths of 1 or more"
            )
        if min(context, tokens_per_step, steps) < 1:
            raise PlannerError(
                f"context {context}, {tokens_per_step} tokens per step and {steps} steps must be positive"
            )
        if context > tokens_per_step:
            raise PlannerError(
                f"a step of {tokens_per_step} tokens does not hold a document of the context's {context}; take more "
                "tokens per step"
            )
        random = np.random.RandomState(seed)
        found: list[Lengths] = []
        cut = np.minimum(sizes, context)
        block = max(16, int(2 * tokens_per_step / cut.mean()))
        rest = np.zeros(0, dtype=np.int64)
        while len(found) < steps:
            while rest.sum() <= tokens_per_step:
                rest = np.concatenate((rest, cut[random.randint(0, len(cut), block)]))
            count = int(np.searchsorted(np.cumsum(rest), tokens_per_step, side="right"))
            found.append(rest[:count])
            rest = rest[count:]
        return LengthSample(tuple(found), context, tokens_per_step)

    @property
    def longest(self) -> tuple[int, ...]:
        """The longest document of each step."""
        return tuple(int(step.max()) for step in self.steps)

    def up_to(self, low: int, high: int, most: int) -> tuple[Lengths, ...]:
        """The first `most` steps whose longest document has more than `low` and at most `high` tokens."""
        found = [
            step for step, longest in zip(self.steps, self.longest, strict=True) if low < longest <= high
        ]
        return tuple(found[:most])


def borders(context: int) -> tuple[int, ...]:
    """Ends of length intervals, ascending, the context last: two per doubling."""
    found = [context]
    while found[-1] > max(512, context // 64):
        found.append(found[-1] // 2 if len(found) % 2 == 0 else found[-1] * 3 // 4)
        if len(found) % 2 == 1:
            found[-1] = found[-3] // 2
    return tuple(sorted(found))


def mean_of(values: Sequence[float]) -> float:
    """The mean, 0 of nothing."""
    return float(np.mean(values)) if len(values) else 0.0
