"""The hierarchical annotation: DG Union, DS Union and HDim (paper §4.2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from hetero_megatron.annotation.device_group import DeviceGroup
from hetero_megatron.annotation.region import FULL, Region
from hetero_megatron.annotation.states import DUPLICATE, PARTIAL, DistributedStates
from hetero_megatron.errors import AnnotationError


@dataclass(frozen=True)
class Annotation:
    """Where a tensor lives and how it is sharded: one DistributedStates per device group, HDim across them.

    `states` describe the bottom tier only and never include the top-tier factor. A tensor on one subgroup
    has `hdim` -1, its only spelling. HSize is the number of subgroups.

    Raises:
        AnnotationError: lengths differ, states do not cover their group, or subgroups share a rank.
    """

    groups: tuple[DeviceGroup, ...]
    states: tuple[DistributedStates, ...]
    hdim: int = DUPLICATE
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        if not self.groups or len(self.groups) != len(self.states):
            raise AnnotationError(f"{len(self.groups)} device groups, but {len(self.states)} states")
        for subgroup, (group, states) in enumerate(zip(self.groups, self.states, strict=True)):
            if states.degree != len(group):
                raise AnnotationError(
                    f"subgroup {subgroup}: states {states} cover {states.degree} devices, group {group} has {len(group)}"
                )
        if len(self._subgroups) != sum(map(len, self.groups)):
            seen: set[int] = set()
            for group in self.groups:
                if shared := seen & set(group):
                    raise AnnotationError(f"rank {min(shared)} is in two subgroups of {self}")
                seen |= set(group)
        if len(self.groups) == 1 and self.hdim != DUPLICATE:
            raise AnnotationError(f"one subgroup, but hdim is {self.hdim}: with HSize 1 it is spelt -1")
        if self.hdim < PARTIAL:
            raise AnnotationError(f"hdim {self.hdim} is neither a tensor dim nor -1 nor -2")
        object.__setattr__(self, "_hash", hash((self.groups, self.states, self.hdim)))

    def __hash__(self) -> int:
        return self._hash

    @staticmethod
    def on(ranks: Sequence[int], parts: Mapping[int, int] | None = None) -> "Annotation":
        """One subgroup: `Annotation.on((0, 1), {0: 2})` splits dim 0 over ranks 0 and 1."""
        return Annotation((DeviceGroup(tuple(ranks)),), (DistributedStates.of(parts or {}),))

    @property
    def hsize(self) -> int:
        """Number of sharding subgroups."""
        return len(self.groups)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, subgroup by subgroup."""
        return tuple(rank for group in self.groups for rank in group)

    @cached_property
    def _subgroups(self) -> dict[int, int]:
        return {rank: subgroup for subgroup, group in enumerate(self.groups) for rank in group}

    @cached_property
    def _regions(self) -> dict[int, Region]:
        return {}

    def subgroup_of(self, rank: int) -> int | None:
        """Index of the subgroup that holds `rank`, or None."""
        return self._subgroups.get(rank)

    def subgroup_region(self, subgroup: int) -> Region:
        """The part of the tensor that `subgroup` holds as a whole (top tier)."""
        return FULL.cut(self.hdim, subgroup, self.hsize) if self.hdim >= 0 else FULL

    def region(self, rank: int) -> Region:
        """The part of the tensor that `rank` holds: the top tier's cut, then the bottom tier's."""
        if (known := self._regions.get(rank)) is None:
            subgroup = self._subgroups.get(rank)
            if subgroup is None:
                raise AnnotationError(f"rank {rank} holds no part of {self}")
            known = _region(
                self.states[subgroup], self.groups[subgroup].index(rank), self.subgroup_region(subgroup)
            )
            self._regions[rank] = known
        return known

    def coord(self, rank: int) -> dict[int, int]:
        """Position of `rank` inside its subgroup's states."""
        subgroup = self._subgroups[rank]
        return self.states[subgroup].coord(self.groups[subgroup].index(rank))

    @cached_property
    def has_partial(self) -> bool:
        """Whether any tier holds partial sums."""
        return self.hdim == PARTIAL or any(states.parts(PARTIAL) > 1 for states in self.states)

    def replace(
        self, states: Sequence[DistributedStates] | None = None, hdim: int | None = None
    ) -> "Annotation":
        """The same groups with other states or another hdim."""
        return Annotation(
            self.groups,
            self.states if states is None else tuple(states),
            self.hdim if hdim is None or self.hsize == 1 else hdim,
        )

    def __str__(self) -> str:
        union = " | ".join(f"{group}{states}" for group, states in zip(self.groups, self.states, strict=True))
        return union if self.hsize == 1 else f"<{union}, hdim {self.hdim}>"


@lru_cache(maxsize=65536)
def _region(states: DistributedStates, index: int, inside: Region) -> Region:
    return states.region(index, inside)
