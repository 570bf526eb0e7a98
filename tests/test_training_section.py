"""The learning-rate schedule as a recipe gives it: what it becomes, and what is refused."""

from pathlib import Path

import pytest

from hetero_megatron.errors import RecipeError
from hetero_megatron.recipe import load_recipe
from hetero_megatron.recipe_sections import TrainingSection
from hetero_megatron.runtime.learning_rate import learning_rate

QUICKSTART = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
SIZES = {"global_batch_size": 8, "seq_length": 64, "lr": 1e-3}


def test_the_quickstart_s_schedule_warms_up_and_falls_to_the_end_of_the_run() -> None:
    settings = load_recipe(QUICKSTART).training.optimizer_settings(150)
    assert [learning_rate(settings, step) for step in (10, 20, 85, 150)] == pytest.approx(
        [1.5e-3, 3e-3, 1.65e-3, 3e-4]
    )


def test_every_setting_of_the_schedule_arrives() -> None:
    section = TrainingSection(
        train_iters=100,
        lr_decay_style="WSD",
        min_lr=1e-5,
        lr_decay_iters=90,
        lr_wsd_decay_iters=20,
        lr_wsd_decay_style="linear",
        lr_warmup_iters=5,
        weight_decay=0.1,
        clip_grad=1.0,
        adam_beta1=0.8,
        adam_beta2=0.95,
        adam_eps=1e-7,
        **SIZES,
    )
    assert section.optimizer_settings(100).to_json() == {
        "name": "adam",
        "lr": 1e-3,
        "min_lr": 1e-5,
        "lr_decay_style": "WSD",
        "lr_warmup_iters": 5,
        "train_iters": 100,
        "beta1": 0.8,
        "beta2": 0.95,
        "eps": 1e-7,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "lr_decay_iters": 90,
        "lr_wsd_decay_iters": 20,
        "lr_wsd_decay_style": "linear",
    }


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["training.train_iters=20"], "training: lr_warmup_iters 20 is not below the 20 iterations"),
        (["training.lr_decay_iters=20"], "iterations of the schedule (lr_decay_iters); lower it, or give"),
        (["training.lr_decay_style=WSD"], "training: lr_decay_style WSD needs lr_wsd_decay_iters"),
        (
            ["training.lr_decay_style=WSD", "training.lr_wsd_decay_iters=140"],
            "training: lr_wsd_decay_iters 140 after lr_warmup_iters 20 is more than the 150 iterations",
        ),
        (["training.lr_wsd_decay_iters=9"], "lr_wsd_decay_iters belongs to lr_decay_style WSD, not cosine"),
        (
            ["training.lr_decay_style=wsd"],
            "'constant', 'linear', 'cosine' or 'WSD' is needed",
        ),
        (["training.nonfinite_limit=0"], "training.nonfinite_limit: 0 does not do"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused_with_the_recipe(overrides: list[str], sentence: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(QUICKSTART, overrides)
    assert sentence in str(refused.value)


def test_epochs_are_checked_against_the_schedule_when_their_steps_are_known() -> None:
    section = TrainingSection(train_epochs=1.0, lr_warmup_iters=20, **SIZES)
    assert section.optimizer_settings(21).decay_end == 21
    with pytest.raises(RecipeError, match="lr_warmup_iters 20 is not below the 20 iterations"):
        section.optimizer_settings(20)
    with pytest.raises(ValueError, match="min_lr 0.1 is above lr 0.001"):
        TrainingSection(train_epochs=1.0, min_lr=0.1, **SIZES)
