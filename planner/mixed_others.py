"""The other ways to train on mixed lengths beside a plan of ours, each with its limits and its mean step (paper §9 c)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.hotspa import plan_buckets
from hetero_megatron.planner.layouts import Layouts
from hetero_megatron.planner.length_sample import Lengths
from hetero_megatron.planner.mixed_baselines import best_windows

PACKED, VARLEN, HOTSPA = "packed", "varlen", "hotspa"
LIMITS: Mapping[str, str] = MappingProxyType(
    {
        PACKED: "as DeepSpeed and Megatron pack: one homogeneous strategy, windows of the whole context, attention over "
        "the window",
        VARLEN: "the same with variable-length attention: inside documents only",
        HOTSPA: "as HotSPa plans: intervals of lengths in turn, one homogeneous DP, TP, PP strategy each, no CP, "
        "switches within the step",
    }
)
"""What each of them cannot do, in a line."""
TUNED = 6
"""Steps that HotSPa's intervals are planned on."""


@dataclass(frozen=True, slots=True)
class Other:
    """Another way, at its best for the steps that it is timed on: mean seconds, and its strategy in words."""

    name: str
    told: str
    seconds: float

    @property
    def limits(self) -> str:
        """What it cannot do."""
        return LIMITS[self.name]


def others(
    layouts: Layouts, steps: Sequence[Lengths], switch_seconds: float | None = None
) -> tuple[Other, ...]:
    """Those that these devices allow."""
    found = []
    for name, varlen in ((PACKED, False), (VARLEN, True)):
        try:
            best = best_windows(layouts, steps, varlen)
        except PlannerError:
            continue
        found.append(Other(name, str(best), best.seconds))
    try:
        buckets = plan_buckets(layouts, steps[:TUNED], switch_seconds)
    except PlannerError:
        return tuple(found)
    return (*found, Other(HOTSPA, str(buckets), buckets.mean(steps)))
