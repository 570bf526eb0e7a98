"""The learning rate against figures worked out by hand, and what a resumed run goes on with (cases O-63, O-64)."""

import json
from dataclasses import replace

import pytest

from hetero_megatron.errors import RuntimeFailure
from hetero_megatron.runtime.learning_rate import check_schedule, learning_rate, resumed_schedule
from hetero_megatron.runtime.optimizer import OptimizerSettings

COSINE = OptimizerSettings(lr=1e-3, min_lr=1e-4, lr_decay_style="cosine", lr_warmup_iters=4, train_iters=20)
WSD = OptimizerSettings(
    lr=1e-3,
    min_lr=2e-4,
    lr_decay_style="WSD",
    lr_warmup_iters=2,
    train_iters=12,
    lr_wsd_decay_iters=4,
)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (1, 2.5e-4),
        (2, 5e-4),
        (3, 7.5e-4),
        (4, 1e-3),
        (10, 7.2221e-4),
        (11, 6.3779e-4),
        (20, 1e-4),
        (50, 1e-4),
    ],
)
def test_cosine_with_warm_up_follows_the_absolute_step(step: int, rate: float) -> None:
    assert learning_rate(COSINE, step) == pytest.approx(rate, rel=1e-5, abs=0)


def test_a_constant_rate_warms_up_too() -> None:
    constant = OptimizerSettings(lr=1e-3, lr_warmup_iters=4, train_iters=20)
    assert [learning_rate(constant, step) for step in (1, 3, 4, 20, 99)] == pytest.approx(
        [2.5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3]
    )
    assert learning_rate(OptimizerSettings(lr=1e-3), 1) == 1e-3


def test_a_linear_rate_falls_from_the_end_of_the_warm_up_to_lr_decay_iters() -> None:
    linear = replace(COSINE, lr_decay_style="linear", lr_decay_iters=14)
    assert [learning_rate(linear, step) for step in (2, 4, 5, 9, 13, 14, 15, 20)] == pytest.approx(
        [5e-4, 1e-3, 9.1e-4, 5.5e-4, 1.9e-4, 1e-4, 1e-4, 1e-4]
    )


@pytest.mark.parametrize(
    ("style", "rates"),
    [
        ("linear", [8e-4, 6e-4, 4e-4, 2e-4]),
        ("cosine", [8.828427e-4, 6e-4, 3.171573e-4, 2e-4]),
        # 2 * 0.5^(1/4) - 1 = 0.681793, 2 * 0.5^(1/2) - 1 = 0.414214, 2 * 0.5^(3/4) - 1 = 0.189207
        ("exponential", [7.454343e-4, 5.313708e-4, 3.513657e-4, 2e-4]),
        # 1 - sqrt(1/4) = 0.5, 1 - sqrt(1/2) = 0.292893, 1 - sqrt(3/4) = 0.133975
        ("minus_sqrt", [6e-4, 4.343146e-4, 3.071797e-4, 2e-4]),
    ],
)
def test_wsd_stays_and_then_falls_in_the_last_steps(style: str, rates: list[float]) -> None:
    settings = replace(WSD, lr_wsd_decay_style=style)
    found = [learning_rate(settings, step) for step in range(1, 15)]
    assert found == pytest.approx([5e-4] + [1e-3] * 7 + rates + [2e-4] * 2, rel=1e-6)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_a_run_in_two_pieces_has_the_rates_of_a_whole_one(style: str) -> None:
    """A rate is a function of settings and step alone; a skipped step has its number like any other."""
    whole = replace(COSINE, lr_decay_style=style)
    saved = json.loads(json.dumps(whole.to_json()))
    settings, notices = resumed_schedule(saved, whole, override=False)
    assert notices == []
    for step in range(1, 41):
        assert learning_rate(settings, step) == learning_rate(whole, step)


GIVEN = replace(COSINE, lr=5e-4, min_lr=5e-5)


def test_with_override_the_recipe_s_schedule_is_taken_as_a_whole() -> None:
    settings, notices = resumed_schedule(COSINE.to_json(), GIVEN, override=True)
    assert learning_rate(settings, 11) == pytest.approx(3.1890e-4, abs=1e-8)
    assert notices == [
        "learning rate: the recipe's schedule replaces the saved one: "
        "lr 0.0005 (was 0.001), min_lr 5e-05 (was 0.0001)"
    ]


def test_without_override_the_saved_schedule_goes_on_and_a_notice_says_what_was_ignored() -> None:
    settings, notices = resumed_schedule(COSINE.to_json(), GIVEN, override=False)
    assert learning_rate(settings, 11) == pytest.approx(6.3779e-4, abs=1e-8)
    assert notices == [
        "learning rate: the saved schedule goes on, and new values in the recipe are ignored: "
        "lr 0.001 (not 0.0005), min_lr 0.0001 (not 5e-05); checkpoint.override_lr_schedule=true takes them"
    ]


def test_a_run_that_is_made_longer_keeps_its_decay_unless_overridden() -> None:
    longer = replace(COSINE, train_iters=40)
    settings, notices = resumed_schedule(COSINE.to_json(), longer, override=False)
    assert settings.train_iters == 40
    assert [learning_rate(settings, step) for step in (11, 20, 40)] == [
        learning_rate(COSINE, step) for step in (11, 20, 40)
    ]
    assert "lr_decay_iters 20 (not 40)" in notices[0]
    settings, notices = resumed_schedule(COSINE.to_json(), longer, override=True)
    assert learning_rate(settings, 22) == pytest.approx(1e-4 + 4.5e-4)
    assert "lr_decay_iters 40 (was 20)" in notices[0]


def test_values_without_effect_are_not_worth_a_notice() -> None:
    before = OptimizerSettings(lr=1e-3, train_iters=10)
    after = replace(before, train_iters=50, lr_wsd_decay_style="linear", min_lr=1e-5, clip_grad=0.0)
    assert resumed_schedule(before.to_json(), after, override=False)[1] == []


def test_other_settings_come_from_the_recipe_and_are_told() -> None:
    settings, notices = resumed_schedule(
        COSINE.to_json(), replace(COSINE, weight_decay=0.1, name="sgd"), override=False
    )
    assert (settings.weight_decay, settings.name) == (0.1, "sgd")
    assert notices == [
        "optimizer: sgd from the recipe replaces the saved adam",
        "weight_decay: 0.1 from the recipe replaces the saved 0",
    ]


def test_settings_survive_json() -> None:
    settings = replace(WSD, clip_grad=1.0, weight_decay=0.1)
    assert OptimizerSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    assert OptimizerSettings.from_json({"lr": 1}) == OptimizerSettings(lr=1)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"learning_rate": 1.0}, "saved optimizer settings: 'learning_rate' is unknown; known: name, lr"),
        ({"lr": "1e-3"}, "saved optimizer settings: lr is '1e-3', where float | int is right"),
        ({"train_iters": True}, "train_iters is True, where int is right"),
        ({"clip_grad": "off"}, r"clip_grad is 'off', where float \| None is right"),
    ],
)
def test_saved_settings_that_cannot_be_read_are_refused(saved: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeFailure, match=message.replace("float | int", r"float \| int")):
        resumed_schedule(saved, COSINE, override=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_lr": 1.0}, "min_lr 1 is above lr 0.001; the rate falls from lr to min_lr"),
        (
            {"lr_warmup_iters": 12},
            r"lr_warmup_iters 12 is not below the 12 iterations of the schedule \(the run\); lower it, or give",
        ),
        ({"lr_decay_iters": 2}, r"lr_warmup_iters 2 is not below the 2 iterations of .* \(lr_decay_iters\)"),
        (
            {"lr_decay_style": "cosine"},
            "lr_wsd_decay_iters belongs to lr_decay_style WSD, not cosine; drop it",
        ),
        ({"lr_wsd_decay_iters": None}, "lr_decay_style WSD needs lr_wsd_decay_iters: in how many"),
        (
            {"lr_wsd_decay_iters": 11},
            "lr_wsd_decay_iters 11 after lr_warmup_iters 2 is more than the 12 iterations .*; at most 10",
        ),
        (
            {"lr_wsd_decay_iters": 13, "lr_warmup_iters": 0},
            "lr_wsd_decay_iters 13 is more than the 12 iterations .*; at most 12",
        ),
    ],
)
def test_a_schedule_whose_parts_do_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    settings = replace(WSD, **changes)  # type: ignore[arg-type]  # names of the table above
    with pytest.raises(RuntimeFailure, match=message):
        check_schedule(settings)
    if changes != {"min_lr": 1.0}:
        with pytest.raises(RuntimeFailure, match=message):
            resumed_schedule(COSINE.to_json(), settings, override=True)


def test_schedules_that_fit_pass() -> None:
    for settings in (COSINE, WSD, OptimizerSettings(), replace(WSD, lr_wsd_decay_iters=10)):
        check_schedule(settings)
