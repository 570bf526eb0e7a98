"""Slow ranks are found by their measured rates, and a plan for them is proposed when it pays (stragglers.py, pace.py)."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from hetero_megatron import train
from hetero_megatron.change_request import ChangeRequests
from hetero_megatron.cluster import KINDS, Cluster, model_of
from hetero_megatron.errors import PlannerError, RecipeError, StrategyError
from hetero_megatron.models.llama import Llama
from hetero_megatron.pace import Pace, Rate, stage_flops
from hetero_megatron.planner.profiles import Kept, Measurement, Profiles, Update
from hetero_megatron.planner.rates import sustained_flops
from hetero_megatron.planner.work import Work, memory_rate
from hetero_megatron.program import Program
from hetero_megatron.recipe import Recipe, load_recipe
from hetero_megatron.run import Run, build_program
from hetero_megatron.runtime.membership import Member, View
from hetero_megatron.runtime.session import Passes, Session
from hetero_megatron.stragglers import WARM_UP, WINDOW, Planner, Watch, alike, spelt
from hetero_megatron.strategy import Strategy
from tests.distributed.training import T0, build, micro_batch, sequences, stage, strategy

RECIPE = """
model: {preset: llama_tiny, num_layers: 8, hidden_size: 128, ffn_hidden_size: 352}
strategy:
  pipelines:
  - {micro_batches: 8, micro_batch_size: 1, stages: [{ranks: 0, layers: 0-3}, {ranks: 1, layers: 4-7}]}
training: {train_iters: 1000, global_batch_size: 8, seq_length: 128, lr: 1e-3}
"""


def recipe(folder: Path, more: str = "") -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(f"{RECIPE}\n{more}\noutput: {folder}\n")
    return load_recipe(path)


def program_of(checked: Recipe) -> Program:
    return build_program(checked, Llama(checked.make_config()))


def rates(planner: Planner, program: Program, speeds: dict[int, float]) -> dict[int, Rate]:
    """What ranks would measure that compute at `speeds` times the predicted rate."""
    _, costs = planner._costs(program.cluster, program.strategy)
    found = {}
    for pipeline in program.strategy.pipelines:
        size = sum(costs.full(pipeline)), sum(each**2 for each in costs.full(pipeline))
        for place, own in enumerate(pipeline.stages):
            seconds = costs.chunk(pipeline, place, 0, *size).total
            slowest = min(speeds[rank] for rank in own.ranks)
            for rank in own.ranks:
                rate = stage_flops(costs.work, program, rank, *size) / seconds
                found[rank] = Rate(rate * speeds[rank], rate * slowest)
    return found


def test_a_slow_device_is_a_kind_of_its_own_that_is_slower_at_everything() -> None:
    cluster = Cluster.of_nodes({"h800": 1, "h20": 1}).slowed({0: 0.5, 9: 0.5, 1: 1.0})
    assert [cluster.device(rank).kind for rank in (0, 1, 9)] == ["h800 at 0.5", "h800", "h20 at 0.5"]
    slow = cluster.kind(9)
    assert (model_of(slow.name), slow.memory_bytes) == ("h20", KINDS["h20"].memory_bytes)
    assert sustained_flops(slow, 4) == pytest.approx(0.5 * sustained_flops(KINDS["h20"], 4))
    assert memory_rate(slow) == pytest.approx(0.5 * memory_rate(KINDS["h20"]))
    assert KINDS["h20"].slowed(0.5).slowed(0.25).name == "h20 at 0.25"


def test_a_profile_knows_what_slow_devices_would_have_measured() -> None:
    profiles = Profiles(
        measurements=(Measurement("cpu", "fp32", "layer", "forward", 1, 1, 64, 64, 1.0),),
        updates=(Update("cpu", "fp32", 10, 1.0),),
        kept=(Kept("cpu", "fp32", "layer", 1, 1, 64, 64, 100),),
        reserved_bytes={"cpu": 7},
    )
    slow = profiles.slowed({"cpu at 0.25": 0.25, "h20 at 0.5": 0.5})
    assert [(each.kind, each.seconds) for each in slow.measurements] == [("cpu", 1.0), ("cpu at 0.25", 4.0)]
    assert [each.seconds for each in slow.updates] == [1.0, 4.0]
    assert [each.bytes for each in slow.kept] == [100, 100]
    assert slow.reserved_bytes == {"cpu": 7, "cpu at 0.25": 7}


def test_ranks_that_are_nearly_alike_have_one_speed() -> None:
    assert alike({0: 3.0, 1: 2.9, 2: 2.8, 3: 0.7, 4: 0.75}) == {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.25, 4: 0.25}
    assert alike({}) == {}


def test_speeds_are_those_measured_over_those_predicted_whatever_the_stages_hold(tmp_path: Path) -> None:
    checked = recipe(tmp_path)
    planner, program = Planner(checked), program_of(checked)
    assert planner.speeds(program, rates(planner, program, {0: 3.0, 1: 3.0})) == {0: 1.0, 1: 1.0}
    assert planner.speeds(program, rates(planner, program, {0: 0.75, 1: 3.0})) == {0: 0.25, 1: 1.0}
    unknown = rates(planner, program, {0: 0.75, 1: 3.0}) | {0: Rate(0.0, 0.0)}
    assert planner.speeds(program, unknown) == {1: 1.0}


def test_of_a_tensor_parallel_group_the_rank_that_computes_longest_is_slow(tmp_path: Path) -> None:
    stages = "strategy: {pipelines: [{micro_batches: 8, stages: [{ranks: 0-1, layers: 0-3}, {ranks: 2-3, layers: 4-7}]}]}"
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "\n".join([RECIPE.splitlines()[1], stages, RECIPE.splitlines()[-1], f"output: {tmp_path}"])
    )
    checked = load_recipe(path)
    planner, program = Planner(checked), program_of(checked)
    found = planner.speeds(program, rates(planner, program, {0: 1.0, 1: 0.5, 2: 1.0, 3: 1.0}))
    assert found == {0: 1.0, 1: 0.5, 2: 1.0, 3: 1.0}


def told(watch: Watch, program: Program, measured: dict[int, Rate], steps: int, first: int = 1) -> None:
    for iteration in range(first, first + steps):
        watch.look(program, measured, 1.0, iteration)


ENOUGH = WARM_UP + WINDOW


def test_a_plan_that_pays_is_written_once_and_read_back(tmp_path: Path) -> None:
    checked = recipe(tmp_path, "elastic: {stragglers: propose}")
    said: list[str] = []
    watch, program = Watch(checked, tmp_path, 1000, said.append), program_of(checked)
    slow = rates(Planner(checked), program, {0: 0.25, 1: 1.0})
    told(watch, program, slow, ENOUGH - 1)
    assert said == []
    told(watch, program, slow, 20, ENOUGH)
    (line,) = said
    assert line.startswith("stragglers: rank 0 computes at 0.25 of the fastest; ")
    path = tmp_path / f"stragglers_{ENOUGH:07d}.yaml"
    assert line.endswith(f"; the strategy is in {path}")
    assert not watch.wants_change
    after = recipe(tmp_path, f"elastic: {{plans: [{path}]}}").make_prepared()[0]
    assert spelt(after) in line
    layers = {
        rank: len(own.layer_numbers) * p.micro_batches
        for p in after.pipelines
        for own in p.stages
        for rank in own.ranks
    }
    assert 3 * layers[0] <= layers[1], "rank 0 has at most a quarter of the work"


def test_it_is_looked_at_again_when_speeds_have_changed(tmp_path: Path) -> None:
    checked = recipe(tmp_path, "elastic: {stragglers: propose}")
    said: list[str] = []
    watch, program, planner = (
        Watch(checked, tmp_path, 1000, said.append),
        program_of(checked),
        Planner(checked),
    )
    told(watch, program, rates(planner, program, {0: 0.25, 1: 1.0}), ENOUGH)
    told(watch, program, rates(planner, program, {0: 1.0, 1: 0.25}), WINDOW, ENOUGH + 1)
    assert [line.split(";")[0] for line in said] == [
        "stragglers: rank 0 computes at 0.25 of the fastest",
        "stragglers: rank 1 computes at 0.25 of the fastest",
    ]


@pytest.mark.parametrize(
    ("speed", "steps", "more"),
    [
        (0.95, 1000, ""),  # nobody is slow
        (0.25, 8, ""),  # too few steps are left
        (0.25, 1000, ", straggler_gain: 9"),  # not enough for whoever wrote the recipe
    ],
)
def test_what_does_not_pay_is_not_proposed(tmp_path: Path, speed: float, steps: int, more: str) -> None:
    checked = recipe(tmp_path, f"elastic: {{stragglers: propose{more}}}")
    said: list[str] = []
    watch, program = Watch(checked, tmp_path, steps, said.append), program_of(checked)
    told(watch, program, rates(Planner(checked), program, {0: speed, 1: 1.0}), 9)
    assert said == []


def test_a_folder_that_cannot_be_written_is_said_and_a_change_is_asked_for_all_the_same(
    tmp_path: Path,
) -> None:
    checked = recipe(tmp_path, "elastic: {stragglers: replan}")
    said: list[str] = []
    asked: list[Strategy] = []
    watch, program = Watch(checked, tmp_path / "no", 1000, said.append), program_of(checked)
    watch.ask = asked.append
    told(watch, program, rates(Planner(checked), program, {0: 0.25, 1: 1.0}), ENOUGH + 5)
    assert "changing to it; " in said[0]
    assert "cannot be written: No such file or directory" in said[0]
    assert len(asked) == 1
    assert watch.wants_change


def test_a_planner_that_fails_is_said_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = recipe(tmp_path, "elastic: {stragglers: propose}")
    said: list[str] = []
    watch, program = Watch(checked, tmp_path, 1000, said.append), program_of(checked)

    def fail(*_: object) -> None:
        raise PlannerError("nothing fits")

    monkeypatch.setattr("hetero_megatron.stragglers.make_plan", fail)
    told(watch, program, rates(Planner(checked), program, {0: 0.25, 1: 1.0}), ENOUGH + 5)
    assert said == ["WARNING: stragglers: no plan for speeds {0: 0.25, 1: 1.0}: nothing fits"]


def test_a_change_without_an_elastic_run_is_refused(tmp_path: Path) -> None:
    checked = recipe(tmp_path, "elastic: {stragglers: replan}")
    run = cast(Run, SimpleNamespace(recipe=checked))
    for environment in ({}, {"RANK": "0", "WORLD_SIZE": "2"}):
        with pytest.raises(
            RecipeError, match="elastic.stragglers: replan changes the strategy of an elastic run"
        ):
            train.start(run, environment)
    section = checked.strategy.model_copy(update={"several": (checked.strategy, checked.strategy)})
    with pytest.raises(
        StrategyError, match="replan looks for one strategy, and this recipe has 2 that take turns"
    ):
        train.refuse_stragglers(checked.model_copy(update={"strategy": section}), True)


def test_each_rank_fills_its_own_place_among_the_votes_and_their_sum_has_all() -> None:
    program = build(Llama(T0), strategy((2, 1, [stage("0-1", "0-2"), stage("2", "3")])))
    batches = [micro_batch([document]) for document in sequences(2)]
    paces, sums = [Pace(T0) for _ in range(3)], [0.0] * 6

    def session(rank: int) -> Session:
        world = SimpleNamespace(rank=rank, ranks=(0, 1, 2), device=torch.device("cpu"))
        passes = Passes(0.5 * (rank + 1), 2.0)
        return cast(Session, SimpleNamespace(world=world, program=program, passes=passes, iteration=1))

    for rank, pace in enumerate(paces):
        assert pace.votes(session(rank)) == (0.0,) * 6
        pace.end(session(rank), batches, (0.0,) * 6)
        sums = [a + b for a, b in zip(sums, pace.votes(session(rank)), strict=True)]
    paces[0].end(session(0), batches, sums)
    found = paces[0].rates
    work = Work(T0)
    first = 3 * 3 * work.layer_flops(32, 512) / 2
    last = 3 * (work.layer_flops(32, 512) + 2 * work.table * 32)
    assert found == {
        0: Rate(first / 0.5, first / 2),
        1: Rate(first / 1.0, first / 2),
        2: Rate(last / 1.5, last / 2),
    }


def test_what_was_asked_for_holds_for_just_its_ranks_until_something_else_is() -> None:
    stored: dict[str, str] = {}
    store = SimpleNamespace(
        set=stored.__setitem__, get=stored.__getitem__, check=lambda keys: all(key in stored for key in keys)
    )
    member = SimpleNamespace(store=store, view=View(2, (0, 1)), is_awaited=lambda: False)
    requests = ChangeRequests(cast(Member, member))
    watch = cast(Watch, SimpleNamespace(ask=None, wants_change=False))
    stops = requests.attend(watch)
    assert not stops()
    assert watch.ask is not None
    first = strategy((8, 1, [stage("0", "0"), stage("1", "1-3")]))
    watch.ask(first)
    watch.wants_change = True
    assert stops()
    assert requests.strategy(View(2, (0, 1))) is None, "asked for later than this view"
    for view in (View(3, (0, 1)), View(3, (0, 1)), View(4, (0, 1))):
        assert requests.strategy(view) == first
    assert requests.strategy(View(5, (1,))) is None, "a rank is lost"
    assert requests.strategy(View(6, (0, 1))) == first
