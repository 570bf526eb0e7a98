"""Strategies drawn by seed train exactly the model that one device would (PARITY).

`pytest -m fuzz --strategies 500` draws more of them, `--strategies 1 --strategies-from SEED` one of them again.
"""

import os
from collections import Counter
from collections.abc import Sequence

import pytest
from torch import Tensor

from hetero_megatron.models.llama import Llama
from hetero_megatron.pipeline.action import Action
from hetero_megatron.pipeline.check import check
from hetero_megatron.runtime import offload
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.session import Evaluation, Session
from tests.distributed.random_strategies import draw, features
from tests.distributed.training import assert_parity, build, reference, train

ALL = (
    "gpipe",
    "1f1b",
    "interleaved",
    "schedule of a file",
    "ring",
    "ulysses",
    "three parts",
    "unequal parts",
    "several pipelines",
    "stages of unequal TP",
    "TP3",
    "TP4",
    "ZeRO-1",
    "recompute full",
    "recompute selective",
    "recompute by layer",
    "offload",
    "offload optimizer",
    "sequence parallel",
    "without sequence parallel",
    "embedding alone",
    "head alone",
    "idle ranks",
    "no micro-batch in one pipeline",
    "tied",
    "biases",
    "edges of odd sizes",
    "kv copies",
    "small buckets",
    "sgd",
    "adam",
)


def test_every_feature_is_drawn_several_times_by_the_first_seeds() -> None:
    counts = Counter(feature for seed in range(60) for feature in features(draw(seed)))
    assert set(counts) == set(ALL)
    rare = {feature: counts[feature] for feature in ALL if counts[feature] < 4}
    assert not rare, f"drawn fewer than 4 times of 60: {rare}"


def test_a_strategy_that_is_drawn_fits_its_model() -> None:
    for seed in range(500):
        case = draw(seed)
        plan = case.strategy
        plan.check(case.config.facts, range(max((*plan.ranks, *plan.idle_ranks)) + 1))


@pytest.mark.fuzz
def test_a_random_strategy_trains_like_one_device(
    strategy_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = draw(strategy_seed)
    print(f"--strategies 1 --strategies-from {strategy_seed} draws\n{case}")
    monkeypatch.setattr(offload, "SMALLEST_OFFLOADED", 256)
    # First, because torch.optim imports torch's compiler, which every rank would otherwise do by itself.
    wanted = reference(case.steps, case.config, case.settings)
    computed: list[Action] = []
    evaluated: list[Evaluation] = []

    def evaluate(session: Session, step: int, batches: list[MicroBatch]) -> list[MicroBatch]:
        """The last step's batches, before the step: parameters may still be on their way."""
        if step == len(case.steps) - 1:
            before = len(computed)
            evaluated.append(session.evaluate(batches))
            del computed[before:]
        return batches

    def watch(session: Session) -> None:
        compute = session.stage.compute

        def noted(action: Action, batches: Sequence[MicroBatch]) -> Tensor | None:
            computed.append(action)
            return compute(action, batches)

        session.stage.compute = noted  # type: ignore[method-assign]

    found = train(
        case.strategy,
        case.steps,
        case.config,
        case.settings,
        prepare=watch,
        batches_of=evaluate,
        collect=lambda session: (computed, evaluated),
        bucket_elements=case.bucket_elements,
    )
    assert_parity(found, wanted)
    valid = [sum(length - 1 for length in step) for step in case.lengths]
    assert [result.valid_tokens for result in found.results] == valid
    program = build(Llama(case.config), case.strategy)
    check(program.schedule.pipelines)
    for rank, (actions, (evaluation,)) in found.extra.items():
        assert evaluation.valid_tokens == valid[-1]
        assert evaluation.loss == pytest.approx(found.losses[-1], rel=1e-6), (
            f"rank {rank} has evaluated otherwise"
        )
        number, _ = program.pipeline_of(rank)
        planned = program.schedule.pipelines[number].compute[program.stage_of(rank)]
        assert actions == list(planned) * len(case.steps), f"rank {rank} has run another schedule"
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
