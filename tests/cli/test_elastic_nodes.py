"""Supervisors of `pretrain --elastic` that are killed, asked to stop, or start later; two stand for two nodes."""

import os
import signal
from pathlib import Path

from hetero_megatron.elastic import Place as At
from hetero_megatron.runtime.checkpoint_files import checkpoints, finished
from tests.cli.elastic_runs import NODES, Losses, Node, Place, free_port, pretrain, supervised, wait_until

# Rank 0 waits long enough for what is to happen meanwhile; the steps themselves take milliseconds.
SLOW = "{kind: delay, rank: 0, iteration: 4, phase: between two steps, seconds: 1}"


def assert_gone(*nodes: Node) -> None:
    """None of their ranks is left, not even of a supervisor that was killed."""
    ranks = [rank for node in nodes for rank in node.ranks]
    wait_until(lambda: not any(Path(f"/proc/{pid}/fd/0").exists() for pid in ranks), 10.0)


def test_a_whole_node_may_be_lost(place: Place, expected: Losses) -> None:
    recipe = place.recipe(f"elastic: {{heartbeat_s: 1, faults: [{SLOW}]}}", NODES)
    endpoint = f"127.0.0.1:{free_port()}"
    with supervised(recipe, At(0, endpoint)) as first, supervised(recipe, At(1, endpoint)) as second:
        wait_until(lambda: len(place.losses()) >= 3)
        first.children()
        second.kill()
        code = first.ended()
    told = first.log.read_text()
    assert code == 0, told
    assert place.losses() == expected
    assert "node 1 with rank 2 has been silent for" in told
    assert "going on with ranks 0-1 after iteration" in told
    assert_gone(first, second)


def test_a_node_that_starts_later_is_taken_in(place: Place, expected: Losses) -> None:
    recipe = place.recipe(f"elastic: {{faults: [{SLOW}]}}", NODES)
    endpoint = f"127.0.0.1:{free_port()}"
    with supervised(recipe, At(0, endpoint, 1)) as first:
        wait_until(lambda: len(place.losses()) >= 2)
        with supervised(recipe, At(1, endpoint, 1)) as second:
            codes = first.ended(), second.ended()
    told = first.log.read_text() + second.log.read_text()
    assert codes == (0, 0), told
    assert place.losses() == expected
    assert "rank 2-3 asked to join" in told
    assert "going on with ranks 0-3 (2-3 new) after iteration" in told


def test_without_their_supervisor_ranks_end_and_the_run_goes_on_from_its_checkpoint(
    place: Place, expected: Losses
) -> None:
    recipe = place.recipe(f"checkpoint: {{interval: 2}}\nelastic: {{faults: [{SLOW}]}}")
    with supervised(recipe) as node:
        wait_until(lambda: len(place.losses()) >= 3)
        node.kill()
        assert_gone(node)
        assert len(node.ranks) == 4
    assert len(place.losses()) < 6
    place.recipe("checkpoint: {interval: 2}")
    assert pretrain(recipe) == 0
    assert place.losses() == expected
    assert list(checkpoints(place.run)) == list(finished(place.run))
    assert max(finished(place.run)) == 6


def test_o66_a_signal_to_the_group_ends_an_elastic_run_after_its_step(place: Place, expected: Losses) -> None:
    workers = (
        place.recipe(f"elastic: {{faults: [{SLOW}]}}").read_text().replace("data: {", "data: {workers: 2, ")
    )
    recipe = place.folder / "recipe.yaml"
    recipe.write_text(workers)
    with supervised(recipe) as node:
        wait_until(lambda: len(place.losses()) >= 3)
        for pid in (*node.children(), node.pid):
            os.kill(pid, signal.SIGTERM)
        assert node.ended() == 0, node.log.read_text()
    (saved,) = finished(place.run)
    assert saved == len(place.losses()) < 6
    assert f"after iteration {saved} of 6; everything is saved in {place.run}" in node.log.read_text()
    assert_gone(node)
    recipe.write_text(workers.replace(SLOW, ""))
    assert pretrain(recipe) == 0
    assert place.losses() == expected
