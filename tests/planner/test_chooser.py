"""The strategy of each step: by padded length, least time, switches counted (case O-43; paper A.1, c)."""

from itertools import product

import numpy as np
import pytest

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import PlannerError
from hetero_megatron.models.presets import LLAMA_TINY
from hetero_megatron.planner.chooser import NamedStrategy, StepChooser
from hetero_megatron.planner.small_batches import SmallBatchCosts
from hetero_megatron.strategy import Pipeline, Stage, Strategy


def one(ranks: tuple[int, ...], max_tokens: int | None = None) -> Pipeline:
    return Pipeline(1, 1, (Stage(ranks, (0, 7)),), max_tokens)


def deep(ranks: tuple[int, ...]) -> Pipeline:
    half = len(ranks) // 2
    return Pipeline(4, 1, (Stage(ranks[:half], (0, 3)), Stage(ranks[half:], (4, 7))))


WIDE = NamedStrategy("A", Strategy((one(tuple(range(4))),)))


def chooser(*strategies: NamedStrategy, seq_length: int = 32, switch: float | None = None) -> StepChooser:
    costs = SmallBatchCosts(LLAMA_TINY, Cluster.local_cpu(12), None, seq_length, "fp32")
    return StepChooser(strategies, costs, switch)


def test_o43_a_strategy_takes_what_it_holds_after_filling_up() -> None:
    # B takes (0, 16] and fills up to 12, A takes the rest up to 32; B would be the faster one.
    short = NamedStrategy("B", Strategy((one(tuple(range(12))),)), 16)
    long = NamedStrategy("A", Strategy((one((0,)),)))
    found = chooser(short, long)
    chosen = []
    for longest in (12, 13, 16, 17, 32):
        table = found.candidates([longest, 3, 4])
        chosen.append("".join(n.name for n, each in zip(found.strategies, table, strict=True) if each))
    assert chosen == ["BA", "A", "A", "A", "A"]
    with pytest.raises(
        PlannerError,
        match=r"document 1 has 33 tokens and fits into no strategy \(longest documents: B: 12, A: 32\); cut such documents",
    ):
        found.choose([3, 33])


def test_the_least_estimated_time_decides_and_all_documents_are_shared() -> None:
    pair = NamedStrategy("pair", Strategy((one((0, 1)), one((2, 3)))))
    found = chooser(WIDE, pair, seq_length=4096)
    random = np.random.RandomState(0)
    for _ in range(6):
        lengths = random.randint(1, 2000, 24).tolist()
        choice = found.choose(lengths)
        assert choice.seconds[choice.strategy] == min(choice.seconds)
        shared = sorted(each for own in choice.pipelines for batch in own for each in batch)
        assert shared == list(range(24))
        assert max(choice.report.seconds) >= choice.report.lower_bound * (1 - 1e-9)
        assert choice.report.tokens == sum(lengths)
        assert choice == found.choose(lengths)


def test_a_switch_is_made_where_the_steps_behind_it_pay_for_it() -> None:
    pair = NamedStrategy("pair", Strategy((one((0, 1), 512), one((2, 3), 512))))
    random = np.random.RandomState(1)
    steps = [random.randint(1, 400, 30).tolist() for _ in range(5)]
    steps[2][0] = 2000
    steps[4][0] = 1000
    for switch in (0.0, 1e-4, 1e-2, 1.0):
        found = chooser(WIDE, pair, seq_length=2048, switch=switch)
        for before in (None, 0, 1):
            choices = found.choose_many(steps, before)
            table = [each.seconds for each in choices]
            total = sum(each.total_seconds for each in choices)
            assert total == pytest.approx(
                min(_total(path, table, switch, before) for path in product((0, 1), repeat=5))
            )
            assert choices[2].strategy == choices[4].strategy == 0


def _total(
    path: tuple[int, ...], table: list[tuple[float | None, ...]], switch: float, before: int | None
) -> float:
    seconds = [row[number] for row, number in zip(table, path, strict=True)]
    if any(each is None for each in seconds):
        return float("inf")
    came = [path[0] if before is None else before, *path[:-1]]
    return sum(each or 0.0 for each in seconds) + switch * sum(
        a != b for a, b in zip(came, path, strict=True)
    )


def test_a_switch_costs_what_bringing_the_parameters_takes() -> None:
    found = chooser(WIDE, NamedStrategy("pair", Strategy((one((0, 1)), one((2, 3))))))
    assert found.switches[0][0] == 0
    # Half of the parameters on a rank take longer than a quarter.
    assert found.switches[0][1] > found.switches[1][0] > 0


def test_micro_batches_of_deep_pipelines_are_ordered_as_is_better() -> None:
    found = chooser(NamedStrategy("deep", Strategy((deep((0, 1, 2, 3)),))), seq_length=2048)
    lengths = [900, 800, 700, 100, 50, 600, 300]
    candidate = found.candidate(0, lengths)
    step = [[tuple(lengths[each] for each in batch) for batch in own] for own in candidate.pipelines]
    assert candidate.seconds == pytest.approx(found.costs.step(found.strategies[0].strategy, step).seconds)
    reordered = [sorted(step[0], key=lambda batch: -sum(n * n for n in batch))]
    assert candidate.seconds <= found.costs.step(found.strategies[0].strategy, reordered).seconds * (1 + 1e-9)


def test_no_strategy_equal_names_and_no_document_are_refused() -> None:
    with pytest.raises(PlannerError, match="there is no strategy to choose from; give at least one"):
        chooser()
    with pytest.raises(PlannerError, match="two strategies have the name 'A'; give each its own"):
        chooser(WIDE, WIDE)
    with pytest.raises(
        PlannerError, match="a step without documents has no strategy; a step takes at least one"
    ):
        chooser(WIDE).choose([])
    assert chooser(WIDE).choose_many([]) == ()
