"""`explain` on every recipe, at full size: within seconds, and plain collectives where a strategy is homogeneous.

The second half is DESIGN's decision 11 and paper §9(a): a homogeneous strategy pays nothing.
"""

import json
import time
from functools import cache
from itertools import product
from typing import Any

import pytest

from hetero_megatron.comm.steps import Collective, CommPlan, Transfer
from hetero_megatron.models.llama import Llama
from hetero_megatron.program import Program
from hetero_megatron.strategy import Pipeline, Stage, Strategy
from tests.cli.commands import run
from tests.distributed.training import T0, build
from tests.paper.files import FOLDER, NAMES, ready
from tests.paper.tables import ALL_DEGREES, PRINTED

MOST_SECONDS = 3.0
# `SR` is one send per rank, to one peer; `AR+RS` one collective after another; `Split` cuts what is there already.
PLAIN = {"Identity", "AR", "RS", "AG", "SR", "Split"}
MODEL = Llama(T0)


@cache
def explained(name: str) -> Any:
    ended = run("explain", str(FOLDER / f"{name}.yaml"), "--json")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


def operators(found: Any) -> set[str]:
    both = [reshard[key] for reshard in found["reshards"] for key in ("operators", "backward_operators")]
    return {part for labels in both for label in labels for part in label.split("+")}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_explained_within_seconds(name: str) -> None:
    ready(name)
    began = time.process_time()
    ended = run("explain", str(FOLDER / f"{name}.yaml"))
    assert ended.code == 0, ended.err
    assert time.process_time() - began < MOST_SECONDS
    assert max(map(len, [line for line in ended.out.splitlines() if line[:1] in "┏│└"])) <= 80


@pytest.mark.parametrize("name", ALL_DEGREES)
def test_homogeneous_recipes_show_only_plain_collectives(name: str) -> None:
    ready(name)
    assert operators(explained(name)) <= PLAIN


@pytest.mark.parametrize("name", [name for name in PRINTED if name.startswith("table9")])
def test_pipelines_of_equal_shape_on_unequal_devices_show_only_plain_collectives(name: str) -> None:
    """Table 9's pipelines cut the model alike, so their copies meet in ordinary groups."""
    assert operators(explained(name)) <= PLAIN


@pytest.mark.parametrize("name", ["c2", "c6", "table15_a", "table15_b", "table16_a"])
def test_unequal_degrees_show_split_operators(name: str) -> None:
    found = operators(explained(name))
    assert found & {"SplitAR", "SplitRS"}
    assert ("SplitAG" in found) == ("SplitRS" in found), "what is reduced to pieces is gathered from them"


def homogeneous(dp: int, tp: int, pp: int, cp: int, zero: int, sequence_parallel: bool) -> Strategy:
    layers = [(stage * 4 // pp, (stage + 1) * 4 // pp - 1) for stage in range(pp)]
    width = tp * cp
    pipelines = tuple(
        Pipeline(
            2,
            1,
            tuple(
                Stage(tuple(range(first, first + width)), layers[stage], tp, cp)
                for stage in range(pp)
                for first in [(replica * pp + stage) * width]
            ),
        )
        for replica in range(dp)
    )
    return Strategy(pipelines, zero, sequence_parallel=sequence_parallel)


def all_plans(program: Program) -> list[CommPlan]:
    activations = [p for r in program.reshards for p in (r.forward, r.backward) if p is not None]
    edges = program.annotated.edge_plans(program.cluster).values()
    return [*activations, *edges, *program.posts.values(), *program.pres.values()]


@pytest.mark.parametrize(("zero", "sequence_parallel"), [*product((0, 1), (False, True))])
@pytest.mark.parametrize(("dp", "tp", "pp", "cp"), [*product((1, 3), (1, 2, 4), (1, 4), (1, 2))])
def test_a_homogeneous_strategy_pays_nothing(
    dp: int, tp: int, pp: int, cp: int, zero: int, sequence_parallel: bool
) -> None:
    program = build(MODEL, homogeneous(dp, tp, pp, cp, zero, sequence_parallel))
    for plan in {id(plan): plan for plan in all_plans(program)}.values():
        for operator in plan.operators:
            assert set(operator.split("+")) <= PLAIN, plan
        for rank in plan.ranks:
            mine = [step for stage in plan.for_rank(rank) for step in stage.steps]
            sends = [step for step in mine if isinstance(step, Transfer)]
            collectives = [step for step in mine if isinstance(step, Collective)]
            assert len([step for step in sends if step.src == rank]) <= 1
            assert len([step for step in sends if step.dst == rank]) <= 1
            assert not (sends and collectives)
            assert len(collectives) <= 2, "a norm's gradient is reduced over TP, then over DP"
