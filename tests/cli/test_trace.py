"""`pretrain --trace` and `simulate --beside`: what ranks did in real steps, beside what was predicted."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from hetero_megatron.models.llama import Llama
from hetero_megatron.pipeline.action import Action
from hetero_megatron.recipe import load_recipe
from hetero_megatron.run import build_program
from hetero_megatron.trace_file import TraceSpan, chrome_trace, read_spans
from tests.cli.commands import SMALL, refusal, run


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("traced") / "small.yaml"
    path.write_text(SMALL + f"output: {path.parent / 'run'}\n")
    return str(path)


@pytest.fixture(scope="module")
def trace(recipe: str) -> Path:
    """The second and third step of a real run of four ranks."""
    path = Path(recipe).with_name("trace.json")
    assert run("pretrain", "--trace", str(path), recipe).code == 0
    return path


def of(spans: list[TraceSpan], rank: int, iteration: int, *categories: str) -> list[TraceSpan]:
    return [
        span
        for span in spans
        if span.rank == rank and span.notes["iteration"] == iteration and span.category in categories
    ]


def test_every_rank_did_just_what_its_schedule_says_in_its_order(recipe: str, trace: Path) -> None:
    checked = load_recipe(recipe)
    program = build_program(checked, Llama(checked.make_config()))
    spans = read_spans(trace.read_text())
    assert {span.notes["iteration"] for span in spans} == {2, 3}
    for rank in range(4):
        number, _ = program.pipeline_of(rank)
        steps = program.actions(rank, program.strategy.pipelines[number].micro_batches)
        wanted = [str(step) for step in steps if isinstance(step, Action)]
        items = [item for step in steps if not isinstance(step, Action) for item in step.items]
        for iteration in (2, 3):
            found = of(spans, rank, iteration, "forward", "backward")
            assert [span.name for span in found] == wanted
            for way in ("send", "receive"):
                names = [str(item) for item in items if item.is_send == (way == "send")]
                assert [span.name for span in of(spans, rank, iteration, way)] == names
            assert len(of(spans, rank, iteration, "agree")) == 2
            assert of(spans, rank, iteration, "update")
            assert of(spans, rank, iteration, "reduce"), "two pipelines have gradients in common"


def test_no_two_spans_of_a_lane_overlap_and_messages_end_after_they_were_sent(trace: Path) -> None:
    spans = read_spans(trace.read_text())
    for rank in range(4):
        for lane in ("compute", "communication"):
            own = sorted((s for s in spans if s.rank == rank and s.lane == lane), key=lambda s: s.start)
            assert own
            for before, after in pairwise(own):
                assert before.start <= before.end <= after.start + 1e-9, (before, after)
    for iteration in (2, 3):
        for sender, receiver, kind in ((0, 2, "F"), (1, 2, "F"), (2, 0, "B"), (2, 1, "B")):
            for sent, got in zip(
                of(spans, sender, iteration, "send"), of(spans, receiver, iteration, "receive"), strict=True
            ):
                assert (sent.name, got.name) == (f"SEND_{kind}{sent.name[-1]}", f"RECV_{kind}{sent.name[-1]}")
                assert sent.start < got.end


def test_names_lanes_and_processes_are_those_of_the_simulator(recipe: str, trace: Path) -> None:
    predicted = trace.with_name("predicted.json")
    assert run("simulate", recipe, "--trace", str(predicted)).code == 0
    measured_text, predicted_text = trace.read_text(), predicted.read_text()

    def said(text: str) -> set[tuple[int, str, str, str]]:
        return {(span.rank, span.lane, span.category, span.name) for span in read_spans(text)}

    # Before a step the ranks of a pipeline compare sizes; the simulator counts that beside the norm.
    sizes = {(rank, "communication", "agree", "sizes") for rank in range(4)}
    assert said(measured_text) - sizes == said(predicted_text)
    names = [
        {e["pid"]: e["args"]["name"] for e in json.loads(text)["traceEvents"] if e["name"] == "process_name"}
        for text in (measured_text, predicted_text)
    ]
    assert names[0] == names[1]
    assert names[0][2] == "rank 2: cpu, pipeline 0 stage 1"


def test_prediction_and_measurement_stand_side_by_side(recipe: str, trace: Path) -> None:
    found = json.loads(run("simulate", recipe, "--beside", str(trace), "--json").out)
    measured = found["measured"]
    assert measured["steps"] == 2
    for own in measured["ranks"].values():
        assert sum(own.values()) == pytest.approx(measured["seconds"])
        assert min(own.values()) >= 0
        assert own["busy"] > 0
    shown = run("simulate", recipe, "--beside", str(trace))
    assert shown.code == 0
    assert "measured step: " in shown.out
    assert "the mean of 2; the predicted one is " in shown.out
    assert "furthest apart: " in shown.out


def test_a_trace_that_does_not_fit_is_refused(recipe: str, trace: Path, tmp_path: Path) -> None:
    assert "--beside: " in refusal("simulate", recipe, "--beside", str(tmp_path / "none.json"))
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert "is no trace that `pretrain --trace` has written" in refusal(
        "simulate", recipe, "--beside", str(other)
    )
    assert run("simulate", recipe, "--trace", str(other)).code == 0
    assert "the trace has no measured step" in refusal("simulate", recipe, "--beside", str(other))
    spans = read_spans(trace.read_text())
    other.write_text(chrome_trace([span for span in spans if span.rank], {}))
    message = refusal("simulate", recipe, "--beside", str(other))
    assert "the trace has ranks 1-3, the strategy 0-3: it is of another strategy" in message
    other.write_text(chrome_trace([span for span in spans if span.name != "B0"], {}))
    message = refusal("simulate", recipe, "--beside", str(other))
    assert "rank 0 computed F0 F1 B1 ... in the trace, F0 F1 B0 B1 ... in the schedule" in message


def test_traces_that_cannot_be_made_are_refused_before_anything_starts(recipe: str, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "no" / "trace.json")
    fresh = f"output={tmp_path / 'fresh'}"
    assert "logging.trace: " in refusal("pretrain", "--trace", nowhere, recipe, fresh)
    late = refusal("pretrain", "--trace", str(tmp_path / "t.json"), recipe, fresh, "logging.trace_steps=7-8")
    assert (
        "logging.trace_steps: 7-8 count from the first step that this command makes, and it makes 3" in late
    )
    zero = refusal("pretrain", recipe, fresh, "logging.trace_steps=0-2")
    assert "logging.trace_steps: steps count from 1" in zero
