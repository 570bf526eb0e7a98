"""The ordered ranks on which a tensor lives (paper §4.1)."""

from collections.abc import Iterator
from dataclasses import dataclass

from hetero_megatron.errors import AnnotationError


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """An ordered list of distinct ranks; the order is the device index that DistributedStates map."""

    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ranks:
            raise AnnotationError("device group () is empty: name at least one rank")
        if len(set(self.ranks)) != len(self.ranks):
            twice = sorted({rank for rank in self.ranks if self.ranks.count(rank) > 1})
            raise AnnotationError(f"device group {self.ranks} names rank {twice[0]} twice")
        if min(self.ranks) < 0:
            raise AnnotationError(f"device group {self.ranks} has a negative rank {min(self.ranks)}")

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks)

    def __contains__(self, rank: object) -> bool:
        return rank in self.ranks

    def index(self, rank: int) -> int:
        """Device index of `rank` in this group."""
        return self.ranks.index(rank)

    def __str__(self) -> str:
        return "(" + ", ".join(map(str, self.ranks)) + ")"
