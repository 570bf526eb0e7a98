"""Which of several strategies takes a step, by its longest document after padding (paper §7, §8 scenario (c))."""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_megatron.errors import StrategyError
from hetero_megatron.program import Program


@dataclass(frozen=True, slots=True)
class LengthRange:
    """A named strategy: the most tokens of one micro-batch that it has memory for, and what tokens are padded to."""

    name: str
    longest: int
    multiple: int = 1

    @staticmethod
    def of(name: str, program: Program, longest: int) -> "LengthRange":
        """The range of a program: padded to what its pipelines need, the one that needs most."""
        pipelines = range(len(program.strategy.pipelines))
        return LengthRange(name, longest, max(program.token_multiple(number) for number in pipelines))

    def padded(self, tokens: int) -> int:
        """`tokens` as this strategy computes them.

        >>> LengthRange("B", 16, 12).padded(13)
        24
        """
        return -(-tokens // self.multiple) * self.multiple


def choose(ranges: Sequence[LengthRange], tokens: int) -> LengthRange:
    """The strategy for the shortest documents that still takes `tokens` once they are padded its own way.

    Raises:
        StrategyError: none does; says what each would have to hold.
    """
    fitting = [each for each in ranges if each.padded(tokens) <= each.longest]
    if not fitting:
        needs = ", ".join(f"{each.name} pads to {each.padded(tokens)} of {each.longest}" for each in ranges)
        raise StrategyError(f"no strategy takes a document of {tokens} tokens: {needs}")
    return min(fitting, key=lambda each: each.longest)
