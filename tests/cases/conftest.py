"""Every case runs twice: with whole optimizer states, and with ZeRO-1 where that changes what ranks hold."""

import dataclasses

import pytest

from hetero_megatron.annotation import Annotation, AnnotationPlan
from hetero_megatron.graph.annotated import STATE
from hetero_megatron.layout import annotate
from tests.distributed import training

CHANGED = pytest.StashKey[dict[str, bool]]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Two runs of whatever trains, unless its module says which stages; what starts no ranks needs only one."""
    if getattr(metafunc.module, "train", None) is training.train:
        stages = getattr(metafunc.module, "ZERO_STAGES", (0, 1))
        metafunc.parametrize("zero_stage", stages, ids=lambda stage: f"zero{stage}", indirect=True)


def _layouts(plan: AnnotationPlan) -> dict[str, Annotation]:
    """A plan without the states that live where their parameter does."""
    return {
        name: own
        for name, own in plan.items()
        if not name.endswith(STATE) or plan[name.removesuffix(STATE)] != own
    }


@pytest.fixture(autouse=True)
def zero_stage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Programs of strategies that do not say otherwise are built for this ZeRO stage.

    The stage is a matter of the annotation plan alone. Where the first run has seen that all plans of a test stay what
    they are, such as those of one pipeline, the second run would be the first one again, and is skipped.
    """
    chosen: int = getattr(request, "param", 0)
    changed = request.config.stash.setdefault(CHANGED, {})
    name = request.node.nodeid.replace("zero1", "zero0")
    if chosen and not changed.get(name, True):
        pytest.skip("no plan of this test is another one under ZeRO-1")
    changed[name] = False
    build = training.build

    def with_zero(model: training.Llama, plan: training.Strategy) -> training.Program:
        program = build(model, dataclasses.replace(plan, zero=max(plan.zero, chosen)))
        graph = program.annotated.graph
        cut = annotate(
            dataclasses.replace(plan, zero=1),
            model.config.facts,
            graph.parameters,
            graph.reshards,
            graph.inputs,
        )
        changed[name] = changed[name] or _layouts(cut) != _layouts(program.plan)
        return program

    monkeypatch.setattr(training, "build", with_zero)
    return chosen
