"""A planning problem as data: the model, the devices by kind and node, and what may be a stage (paper A.1).

Devices of one kind and node are alike, and nodes with equally many of them are alike: a stage is first a `Block`, which
says of what kind and how many, and gets its ranks when the plan is done. So no search goes through permutations.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import PlannerError
from hetero_megatron.models.config import LlamaConfig

LONG = 16384
"""Tokens of a row from which context parallelism is looked at, where nobody says otherwise."""


@dataclass(frozen=True, order=True)
class Block:
    """The devices of one stage before they have ranks: `cp` parts of `tp` devices of one kind.

    `spread` over several whole nodes, where one has not enough.
    """

    kind: str
    tp: int
    cp: int = 1
    spread: bool = False

    def __post_init__(self) -> None:
        # Blocks are looked up all the time.
        object.__setattr__(self, "_hash", hash((self.kind, self.tp, self.cp, self.spread)))

    def __hash__(self) -> int:
        known: int = self._hash  # type: ignore[attr-defined]  # set once in __post_init__
        return known

    @property
    def ranks(self) -> int:
        """How many devices."""
        return self.tp * self.cp


@dataclass(frozen=True, slots=True)
class Choices:
    """What the planner may choose from; an empty tuple leaves it to the problem.

    Attributes:
        tensor_parallel: degrees; left out, those that heads, nodes and sizes allow.
        context_parallel: parts of a row; left out, 1, and 2, 4 and 8 for rows of `LONG` tokens or more.
        micro_batch_sizes: rows of a micro-batch.
        zero: 0, 1 or both.
        recompute: what may be computed again where memory asks for it.
        pipelines: how many; left out, any number.
    """

    tensor_parallel: tuple[int, ...] = ()
    context_parallel: tuple[int, ...] = ()
    micro_batch_sizes: tuple[int, ...] = (1, 2, 4)
    zero: tuple[int, ...] = (0, 1)
    recompute: tuple[str, ...] = ("selective", "full")
    pipelines: tuple[int, ...] = ()


@dataclass(frozen=True)
class Problem:
    """What a plan is for: a model on a cluster, so many rows of so many tokens a step.

    Raises:
        PlannerError: no device, no sequence, or a choice that leaves nothing.
    """

    config: LlamaConfig
    cluster: Cluster
    global_batch_size: int
    seq_length: int
    choices: Choices = field(default_factory=Choices)

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise PlannerError(
                f"{self.global_batch_size} sequences a step: there is nothing to deal out; "
                "global_batch_size is 1 or more"
            )
        if not self.degrees:
            raise PlannerError(
                f"no tensor-parallel degree is left: {self.config.num_attention_heads} attention heads and "
                f"{self.config.num_query_groups} kv heads allow none of {list(self.choices.tensor_parallel)}"
            )

    @cached_property
    def supply(self) -> "Supply":
        """The devices by kind and node."""
        return Supply.of(self.cluster)

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees: what heads, kv heads and sizes allow, powers of two or divisors of a node."""
        config, largest = self.config, max(self.supply.largest.values())
        sites = {size for own in self.supply.sites.values() for size in own.values()}
        wanted = self.choices.tensor_parallel or tuple(
            n for n in range(1, 2 * largest + 1) if n & (n - 1) == 0 or any(size % n == 0 for size in sites)
        )
        return tuple(n for n in sorted(set(wanted)) if allows(config, n))

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Context-parallel sizes."""
        return self.choices.context_parallel or ((1, 2, 4, 8) if self.seq_length >= LONG else (1,))

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Micro-batch sizes that the batch can be made of."""
        sizes = tuple(n for n in self.choices.micro_batch_sizes if self.global_batch_size % n == 0)
        if not sizes:
            raise PlannerError(
                f"a batch of {self.global_batch_size} sequences is no multiple of a micro-batch size in "
                f"{list(self.choices.micro_batch_sizes)}; allow size 1"
            )
        return sizes

    @cached_property
    def blocks(self) -> Mapping[str, tuple[Block, ...]]:
        """What may be a stage, by kind, smallest first."""
        found: dict[str, tuple[Block, ...]] = {}
        for kind, largest in self.supply.largest.items():
            found[kind] = tuple(
                sorted(
                    (
                        Block(kind, tp, cp, tp * cp > largest)
                        for tp in self.degrees
                        for cp in self.parts
                        if self.supply.room(kind, tp * cp)
                    ),
                    key=lambda block: (block.ranks, block),
                )
            )
        return found


def allows(config: LlamaConfig, tp: int) -> bool:
    """Whether heads, kv heads and sizes can be split over so many ranks."""
    groups = config.num_query_groups
    return (
        config.num_attention_heads % tp == 0
        and (groups % tp == 0 or tp % groups == 0)
        and min(config.ffn_hidden_size, config.vocab_size) >= tp
    )


@dataclass(frozen=True)
class Supply:
    """Devices of each kind by node: how many stages of a size they are good for."""

    sites: Mapping[str, Mapping[int, int]]

    @staticmethod
    def of(cluster: Cluster) -> "Supply":
        """The devices of a cluster."""
        sites: dict[str, Counter[int]] = {}
        for device in cluster.devices:
            sites.setdefault(device.kind, Counter())[device.node] += 1
        return Supply({kind: dict(sorted(own.items())) for kind, own in sites.items()})

    @cached_property
    def largest(self) -> dict[str, int]:
        """Most devices of a kind in one node."""
        return {kind: max(own.values()) for kind, own in self.sites.items()}

    @cached_property
    def count(self) -> dict[str, int]:
        """Devices of each kind."""
        return {kind: sum(own.values()) for kind, own in self.sites.items()}

    @cached_property
    def _rooms(self) -> dict[tuple[str, int], int]:
        return {}

    def room(self, kind: str, size: int) -> int:
        """Most stages of `size` devices: inside nodes, or of whole nodes of the largest size."""
        known = self._rooms.get((kind, size))
        if known is None:
            own, largest = self.sites.get(kind, {}), self.largest.get(kind, 0)
            # A kind of which no device is left has room for nothing.
            if size <= largest:
                known = sum(count // size for count in own.values())
            else:
                whole = sum(count == largest for count in own.values())
                known = whole // (size // largest) if largest and size % largest == 0 else 0
            self._rooms[kind, size] = known
        return known

    def holds(self, blocks: Iterable[Block]) -> bool:
        """Whether there are devices for all of them.

        Exact where each size divides the next larger one: taking a large block out of any node leaves the same
        number of smaller ones.
        """
        wanted: dict[str, Counter[int]] = {}
        for block in blocks:
            wanted.setdefault(block.kind, Counter())[block.ranks] += 1
        for kind, sizes in wanted.items():
            for size in sizes:
                needed = sum(count * (other // size) for other, count in sizes.items() if other >= size)
                if needed > self.room(kind, size):
                    return False
        return True
