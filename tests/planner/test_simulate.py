"""The event simulation: what adds up, and that it agrees with the recursion where nothing queues."""

import json
from itertools import pairwise

import pytest

from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.simulate import Simulation, simulate
from hetero_megatron.trace_file import chrome_trace
from tests.planner.plans import CLUSTER, CONFIG, PLANS, SEQUENCE, costs, program


def run(name: str) -> tuple[Simulation, Costs]:
    found = costs(name)
    return simulate(program(name), found), found


@pytest.mark.parametrize("name", PLANS)
def test_events_and_recursion_agree(name: str) -> None:
    simulated, priced = run(name)
    step = priced.step(PLANS[name])
    assert simulated.seconds == pytest.approx(step.seconds, rel=0.02)
    assert simulated.bound == pytest.approx(step.bound_seconds)


@pytest.mark.parametrize("name", PLANS)
def test_busy_communication_and_bubble_add_up_to_the_step_and_the_bound_is_below_it(name: str) -> None:
    simulated, _ = run(name)
    assert simulated.bound <= simulated.seconds
    assert [each.rank for each in simulated.ranks] == sorted(PLANS[name].ranks)
    for each in simulated.ranks:
        assert each.busy + each.comm + each.bubble == pytest.approx(simulated.seconds)


@pytest.mark.parametrize("name", PLANS)
def test_every_action_of_the_schedule_runs_once_and_stages_do_one_thing_at_a_time(name: str) -> None:
    simulated, _ = run(name)
    built = program(name)
    for place, ranks in simulated.places.items():
        spans = [span for span in simulated.spans if span.place == place and span.what == "compute"]
        steps = built.actions(ranks[0], built.strategy.pipelines[place[0]].micro_batches)
        assert [span.name for span in spans] == [str(step) for step in steps if not hasattr(step, "items")]
        for before, after in pairwise(spans):
            assert before.end <= after.start


@pytest.mark.parametrize("name", PLANS)
def test_memory_peaks_at_what_the_closed_form_says(name: str) -> None:
    simulated, priced = run(name)
    memory = priced.memory(PLANS[name])
    for each in simulated.ranks:
        assert each.memory_peak == memory[each.rank]
        values = [value for _, value in simulated.memory[each.rank]]
        assert values[-1] == min(values), "nothing is kept at the end"


def test_given_micro_batches_take_the_place_of_full_ones() -> None:
    simulated, priced = run("unequal")
    halves = [[(SEQUENCE // 2,)] * pipeline.micro_batches for pipeline in PLANS["unequal"].pipelines]
    short = simulate(program("unequal"), priced, halves)
    assert 0.3 * simulated.seconds < short.seconds < 0.8 * simulated.seconds
    varied = [[(SEQUENCE,), (SEQUENCE // 4,) * 3, (10,)], [(SEQUENCE,), (5, 6, 7)]]
    assert simulate(program("unequal"), priced, varied).seconds == pytest.approx(
        priced.step(PLANS["unequal"], varied).seconds, rel=0.02
    )


def test_micro_batches_for_other_pipelines_are_refused() -> None:
    with pytest.raises(PlannerError, match=r"given for 1 pipelines, the strategy has 2"):
        simulate(program("unequal"), costs("unequal"), [[(8,)]])


def test_json_has_the_keys_that_were_agreed() -> None:
    simulated, _ = run("two stages")
    found = json.loads(json.dumps(simulated.as_json()))
    assert list(found) == ["step_seconds", "bound_seconds", "ranks"]
    assert list(found["ranks"][0]) == ["rank", "busy", "comm", "bubble", "memory_peak_bytes"]


def test_a_trace_names_ranks_and_lanes_and_covers_the_step() -> None:
    simulated, _ = run("zero")
    text = chrome_trace(simulated.trace_spans(), simulated.trace_names(), simulated.trace_counters())
    events = json.loads(text)["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert "rank 0: h800, pipeline 0 stage 0" in names
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert lanes == {"compute", "communication"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {"forward", "backward", "reduce", "gather", "update"} <= {event["cat"] for event in spans}
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(1e6 * simulated.seconds, abs=1)
    counters = {event["pid"] for event in events if event["ph"] == "C"}
    assert counters == set(PLANS["zero"].ranks)


def test_the_way_of_a_message_delays_the_receiver_only_where_it_waits() -> None:
    simulated, priced = run("two stages")
    tokens = SEQUENCE
    stages = PLANS["two stages"].pipelines[0].stages
    first = next(span for span in simulated.spans if span.place == (0, 1) and span.what == "compute")
    sent = next(span for span in simulated.spans if span.place == (0, 0) and span.what == "compute")
    assert first.start == pytest.approx(sent.end + priced.boundary(*stages, tokens))


def test_costs_and_program_are_of_the_same_cluster() -> None:
    assert {each.kind for each in run("unequal")[0].ranks} == {kind.name for kind in CLUSTER.kinds}
    assert CONFIG.num_layers == 8
