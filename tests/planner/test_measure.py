"""Measuring on this machine: what comes out is complete, and memory is what the formulas say."""

from dataclasses import replace

import pytest

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import PlannerError, StrategyError
from hetero_megatron.models.presets import LLAMA_TINY
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.measure import Experiment, measure
from hetero_megatron.planner.profiles import PHASES, UNITS, Profiles
from hetero_megatron.strategy import Pipeline, Stage, Strategy

CONFIG = replace(LLAMA_TINY, hidden_size=64, ffn_hidden_size=192)
SMALL = Experiment(((1, 1), (2, 1)), ((32, 16), (64, 32), (64, 64)), rounds=1, micro_batches=2, copies=2)


@pytest.fixture(scope="module")
def found() -> Profiles:
    told: list[str] = []
    profiles = measure(CONFIG, "fp32", "cpu", "cpu", SMALL, told.append)
    assert told == ["tp 1, cp 1: 2 ranks, 3 sizes", "tp 2, cp 1: 2 ranks, 3 sizes"]
    return profiles


def test_every_unit_phase_degree_and_size_is_measured(found: Profiles) -> None:
    expected = {
        (unit, phase, tp, *size)
        for unit in UNITS
        for phase in PHASES
        for tp, _ in SMALL.degrees
        for size in SMALL.sizes
        if (unit, phase) != ("embedding", "weight_gradient")
    }
    assert {(m.unit, m.phase, m.tp, m.tokens, m.seq_length) for m in found.measurements} == expected
    assert all(m.seconds > 0 for m in found.measurements if m.unit == "embedding")
    assert {t.operation for t in found.transfers} == {"p2p", "all_reduce", "all_gather", "reduce_scatter"}
    assert {t.link for t in found.transfers} == {Cluster.local_cpu(1).kind(0).link.name}
    assert found.model["hidden_size"] == 64
    assert "kernels: " in found.notes


def test_updates_are_of_both_models_and_grow_with_elements(found: Profiles) -> None:
    small, large = sorted(found.updates, key=lambda each: each.elements)
    layer = Costs(CONFIG, Cluster.local_cpu(1)).work.layer_parameters
    assert large.elements - small.elements == 2 * layer


def test_what_autograd_keeps_is_what_the_formulas_say(found: Profiles) -> None:
    for tp in (1, 2):
        plan = Strategy((Pipeline(1, 1, (Stage(tuple(range(tp)), (0, 7)),)),))
        formula, measured = (
            Costs(CONFIG, Cluster.local_cpu(tp), profiles, 64, "fp32").activation_bytes(plan)[0]
            for profiles in (None, found)
        )
        assert measured == pytest.approx(formula, rel=0.10), tp


def test_the_profile_prices_a_step_without_a_guess(found: Profiles) -> None:
    costs = Costs(CONFIG, Cluster.local_cpu(2), Profiles.from_json(found.to_json()), 64, "fp32")
    plan = Strategy((Pipeline(4, 1, (Stage((0,), (0, 3)), Stage((1,), (4, 7)))),))
    assert 0 < costs.step(plan).seconds < 60
    assert not costs.warnings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"degrees": ((0, 1),)}, r"tp 0 and cp 1 are degrees; 1 or more is right"),
        (
            {"sizes": ((64, 128),)},
            r"a micro-batch of 64 tokens has no documents of 128; a length between 1 and 64",
        ),
        ({"copies": 0}, r"0 copies side by side; 1 or more is right"),
        ({"rounds": 0}, r"0 rounds of 2 micro-batches; 1 round and 2 micro-batches"),
    ],
)
def test_what_cannot_be_measured_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(PlannerError, match=message):
        replace(SMALL, **change)  # type: ignore[arg-type]


def test_degrees_must_fit_the_model_and_the_machine() -> None:
    with pytest.raises(StrategyError, match="4 attention heads"):
        measure(CONFIG, "fp32", "cpu", "cpu", replace(SMALL, degrees=((3, 1),)))
    with pytest.raises(PlannerError, match=r"tp x cp of 4096 needs as many GPUs, and this machine has \d+"):
        measure(CONFIG, "fp32", "h20", "cuda", replace(SMALL, degrees=((4096, 1),)))


def test_a_rank_that_fails_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        return 3

    monkeypatch.setattr("hetero_megatron.planner.measure.fork_ranks", fail)
    with pytest.raises(PlannerError, match=r"a rank of tp 1, cp 1 ended with exit code 3"):
        measure(CONFIG, "fp32", "cpu", "cpu", replace(SMALL, degrees=((1, 1),)))
