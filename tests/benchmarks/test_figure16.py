"""The paper's elastic traces with real processes (Figure 16): losses and weights are one device's, whoever is lost.

`pytest -m fuzz` replays the paper's own, with up to 48 ranks; without it a trace of the same kind with 8 ranks is.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.figure16.picture import draw
from benchmarks.figure16.replay import Replay, replay
from benchmarks.figure16.traces import TRACES, Change, Trace, strategies, write_recipe
from hetero_megatron.cluster import ranges_text
from hetero_megatron.recipe import load_recipe
from hetero_megatron.strategy import Strategy
from tests.distributed.training import stage, strategy
from tests.paper.files import ready
from tests.whole import all_are_asked_for

# A rank fails, and then the rest of its node of two.
SMALL = Trace("8 ranks", "8", (Change("7", (7,)), Change("6", (6,))), nodes=1)
SMALL_STRATEGIES = {
    "8": strategy(
        (2, 2, [stage("0-1", "0-1"), stage("2-3", "2-3")]), (2, 2, [stage("4-5", "0-1"), stage("6-7", "2-3")])
    ),
    "7": strategy(
        (5, 1, [stage("0-1", "0-1"), stage("2-3", "2-3")]),
        (3, 1, [stage("4-5", "0-2"), stage("6", "3")]),
        idle_ranks=(7,),
    ),
    "6": strategy(
        (4, 1, [stage("0-1", "0-2"), stage("2", "3")]),
        (4, 1, [stage("3-4", "0-1"), stage("5", "2-3")]),
        idle_ranks=(6, 7),
    ),
}


def assert_undisturbed(found: Replay, trace: Trace, named: Mapping[str, Strategy]) -> None:
    """Losses, weights and moments are one device's; every configuration was the prepared one and made steps."""
    assert found.furthest < 1e-5
    assert found.weights <= 1
    assert [(each.before, each.after) for each in found.recoveries] == [
        (trace.configurations[n], change.after) for n, change in enumerate(trace.changes)
    ]
    for each in found.recoveries:
        assert each.ranks == ranges_text(named[each.after].ranks)
        assert each.as_prepared, f"the log of {each.after} shows another strategy"
        assert each.moved_mb > 0
    assert all(found.of(name) for name in trace.configurations)


@pytest.mark.timeout(240)
def test_a_trace_that_loses_a_rank_and_then_its_node_trains_like_one_device(tmp_path: Path) -> None:
    found = replay(SMALL, SMALL_STRATEGIES, 2, tmp_path, print)
    assert_undisturbed(found, SMALL, SMALL_STRATEGIES)
    again = Replay.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found
    draw([again], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The paper's traces, where they are asked for."""
    if "paper_trace" in metafunc.fixturenames:
        asked = all_are_asked_for(metafunc.config)
        metafunc.parametrize("paper_trace", TRACES if asked else [])


@pytest.mark.fuzz
@pytest.mark.timeout(3000)
def test_the_papers_traces_train_like_one_device(paper_trace: str, tmp_path: Path) -> None:
    trace = TRACES[paper_trace]
    named = strategies(trace, 12, 16)
    assert_undisturbed(replay(trace, named, 3, tmp_path, print), trace, named)


@pytest.mark.parametrize("name", TRACES)
def test_with_all_layers_and_rows_the_strategies_are_the_papers(name: str) -> None:
    for configuration, found in strategies(TRACES[name], 60, 64).items():
        assert found == ready(configuration).make_strategy()


@pytest.mark.parametrize("name", TRACES)
def test_reduced_strategies_keep_ranks_and_what_is_unequal(name: str, tmp_path: Path) -> None:
    trace = TRACES[name]
    named = strategies(trace, 12, 16)
    largest = max(named.values(), key=lambda each: len(each.ranks))
    recipe = load_recipe(write_recipe(tmp_path, "run", trace, largest, tuple(named.values()), 3))
    assert recipe.make_prepared() == tuple(named.values())
    for configuration, found in named.items():
        whole = ready(configuration).make_strategy()
        assert (found.ranks, found.idle_ranks) == (whole.ranks, whole.idle_ranks)
        rows = [p.micro_batches * p.micro_batch_size for p in found.pipelines]
        assert sum(rows) == 16
        assert (rows[0] == rows[1]) == (configuration not in ("c2", "c6"))
