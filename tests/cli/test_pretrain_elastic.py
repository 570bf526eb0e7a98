"""`pretrain --elastic`: a run as a person sees it that loses ranks, goes on, and goes back to a checkpoint if it must."""

import re

import pytest

from hetero_megatron import elastic, train
from hetero_megatron.errors import RecipeError, StrategyError
from hetero_megatron.recipe import load_recipe
from hetero_megatron.runtime.checkpoint_files import checkpoints, finished
from tests.cli.elastic_runs import Losses, Place, pretrain


def test_a_rank_that_is_killed_while_saving_changes_no_loss(
    place: Place, expected: Losses, capfd: pytest.CaptureFixture[str]
) -> None:
    fault = "elastic: {faults: [{kind: kill, rank: 0, iteration: 4, phase: saving}]}"
    assert pretrain(place.recipe(f"checkpoint: {{interval: 2}}\n{fault}")) == 0
    told = capfd.readouterr().out
    assert place.losses() == expected
    assert place.samples() == [(3 * step, 3 * step + 3) for step in range(6)]
    assert "survival: no loss of a single rank loses anything" in told
    assert "rank 0 was killed by SIGKILL in saving of iteration 4; noticed by rank" in told
    assert "going on with ranks 1-3 after iteration 4" in told
    phases = ("detect", "agree", "complete", "plan", "groups", "specialize", "move", "redo")
    parts = ", ".join(rf"{phase} \d+\.\d{{3}}" for phase in phases)
    line = rf"recovered: iteration 5 is committed \d+\.\d{{3}} s after the loss was noticed \({parts}\)"
    assert re.search(line, told)
    assert "planned: " in told
    # The save of iteration 2 may have been under way until rank 0 was to finish it.
    assert list(checkpoints(place.run)) == list(finished(place.run))
    assert [number for number in finished(place.run) if number > 2] == [4, 6]


def test_a_save_that_ranks_were_lost_amid_is_removed_and_those_before_and_after_are_whole(
    place: Place, expected: Losses, capfd: pytest.CaptureFixture[str]
) -> None:
    fault = "{faults: [{kind: kill, rank: 1, iteration: 4, phase: saving, occurrence: 2}], replan: keep}"
    assert pretrain(place.recipe(f"checkpoint: {{interval: 2}}\nelastic: {fault}")) == 0
    told = capfd.readouterr().out
    assert place.losses() == expected
    assert "iter_0000004 was not saved: ranks were lost meanwhile; its files are removed" in told
    assert "the strategy without the lost ranks (elastic.replan is keep)" in told
    assert list(checkpoints(place.run)) == list(finished(place.run)) == [2, 6]


def test_what_nobody_has_left_comes_from_the_last_checkpoint(
    place: Place, expected: Losses, capfd: pytest.CaptureFixture[str]
) -> None:
    faults = ", ".join(f"{{kind: kill, rank: {rank}, iteration: 5, phase: backward}}" for rank in (2, 3))
    more = f"checkpoint: {{interval: 3, asynchronous: false}}\nelastic: {{faults: [{faults}]}}"
    assert pretrain(place.recipe(more)) == 0
    told = capfd.readouterr().out
    assert place.losses() == expected
    assert "back to the last checkpoint; going on with ranks 0-1 after iteration 3" in told
    assert "layer 1" in told


@pytest.mark.parametrize(
    ("at", "told"),
    [
        (elastic.Place(1), "several nodes need --endpoint HOST:PORT, the address of node 0"),
        (elastic.Place(0, "here"), "--endpoint 'here' is no HOST:PORT, such as node0:29500"),
        (
            elastic.Place(1, "node0:1"),
            "--node-rank 1 and --nodes-present 1: the strategy has ranks on 1 nodes, numbered 0 to 0",
        ),
    ],
)
def test_nodes_that_do_not_fit_are_refused(place: Place, at: elastic.Place, told: str) -> None:
    run = train.prepare(load_recipe(place.recipe()))
    with pytest.raises(StrategyError) as refused:
        elastic.pretrain_elastic(run, at)
    assert told in str(refused.value)


def test_a_fault_of_a_rank_that_does_not_exist_is_refused(place: Place) -> None:
    fault = "elastic: {faults: [{kind: kill, rank: 7, iteration: 4, phase: saving}]}"
    run = train.prepare(load_recipe(place.recipe(fault)))
    with pytest.raises(
        StrategyError, match=r"elastic.faults: rank 7 is none of the strategy's ranks \[0, 1, 2, 3\]"
    ):
        elastic.pretrain_elastic(run)


def test_an_unknown_phase_is_refused(place: Place) -> None:
    with pytest.raises(RecipeError, match="phase"):
        load_recipe(place.recipe("elastic: {faults: [{kind: kill, rank: 0, iteration: 4, phase: x}]}"))
