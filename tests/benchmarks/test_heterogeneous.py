"""The plan for a fast and a slow rank, under a profile made by hand."""

from benchmarks.heterogeneous import SEQUENCE, even_pipelines, joined, planned
from benchmarks.simulator import SLOW, Run, cluster_of, predict, with_slow_kind
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.planner.profiles import Measurement, Profiles, Update

CONFIG = LlamaConfig(10, 256, 688, 4, 4, 4096)
ROWS = 16


def fast() -> Profiles:
    units = {"layer": 7e-3, "embedding": 1e-4, "head": 8e-3}
    return Profiles(
        measurements=tuple(
            Measurement("cpu", "fp32", unit, phase, 1, 1, SEQUENCE, SEQUENCE, passes * seconds)  # type: ignore[arg-type]
            for unit, seconds in units.items()
            for phase, passes in (("forward", 1), ("backward", 2))
        ),
        updates=(Update("cpu", "fp32", 10**6, 4e-3), Update("cpu", "fp32", 10**7, 4e-2)),
    )


def test_the_plan_is_predicted_to_be_twice_as_fast_as_equal_stages() -> None:
    profile = with_slow_kind(fast(), 4.0)
    even = [Run("even", strategy, (1,)) for strategy in even_pipelines(CONFIG.num_layers, ROWS)]
    plan, single = planned(CONFIG, cluster_of(even[0]), profile, ROWS)
    best = min(predict(run, profile, CONFIG, SEQUENCE) for run in even)
    assert plan.best.seconds * 2 < best
    assert plan.best.seconds <= single.best.seconds
    assert predict(Run("plan", plan.strategy, (1,)), profile, CONFIG, SEQUENCE) == plan.best.seconds
    # Nothing was guessed: the profile has both kinds in the precision that is planned for.
    assert not [text for text in plan.costs.warnings if "published" in text]


def test_a_profile_of_both_kinds_has_the_measurements_of_both() -> None:
    both = joined(fast(), with_slow_kind(fast(), 4.0))
    assert {each.kind for each in both.measurements} == {"cpu", SLOW}
