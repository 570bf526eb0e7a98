"""Every case runs twice: with whole optimizer states, and with ZeRO-1."""

import dataclasses

import pytest

from tests.distributed import training


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Two runs of whatever trains, unless its module says which stages; what starts no ranks needs only one."""
    if getattr(metafunc.module, "train", None) is training.train:
        stages = getattr(metafunc.module, "ZERO_STAGES", (0, 1))
        metafunc.parametrize("zero_stage", stages, ids=lambda stage: f"zero{stage}", indirect=True)


@pytest.fixture(autouse=True)
def zero_stage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Programs of strategies that do not say otherwise are built for this ZeRO stage."""
    chosen: int = getattr(request, "param", 0)
    build = training.build

    def with_zero(model: training.Llama, plan: training.Strategy) -> training.Program:
        return build(model, dataclasses.replace(plan, zero=max(plan.zero, chosen)))

    monkeypatch.setattr(training, "build", with_zero)
    return chosen
