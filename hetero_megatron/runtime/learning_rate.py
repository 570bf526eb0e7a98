"""The learning rate by absolute step, with Megatron's styles, and which schedule a resumed run follows.

Steps count from 1, so that the first one learns. A step that makes no update counts like any other: the schedule of a
run is a function of the iteration alone, and after a stop it goes on where it was.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from hetero_megatron.errors import RuntimeFailure
from hetero_megatron.runtime.optimizer import OptimizerSettings

WSD_STYLES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "exponential": lambda done: 2 * 0.5**done - 1,
    "minus_sqrt": lambda done: 1 - math.sqrt(done),
}
"""What is left of lr - min_lr when the share `done` of the decay is over: 1 at 0, and 0 at 1."""

STYLES = ("constant", "linear", "cosine", "WSD")
SCHEDULE = (
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_warmup_iters",
    "lr_decay_iters",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_style",
)
"""The settings that make a schedule; a resumed run takes all of them from one place."""


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """The rate of step `step` (from 1): linear warm-up to `lr`, then `lr_decay_style` down to `min_lr`.

    `linear` and `cosine` fall from the end of the warm-up to `decay_end`; `WSD` stays at `lr` and falls in the last
    `lr_wsd_decay_iters` steps before it, by `lr_wsd_decay_style`; afterwards the rate is `min_lr`.

    >>> s = OptimizerSettings(lr=1e-3, min_lr=1e-4, lr_decay_style="cosine", lr_warmup_iters=4, train_iters=20)
    >>> f"{learning_rate(s, 10):.4e}"
    '7.2221e-04'
    """
    if step < settings.lr_warmup_iters:
        return settings.lr * step / settings.lr_warmup_iters
    if settings.lr_decay_style == "constant":
        return settings.lr
    end = settings.decay_end
    if step >= end:
        return settings.min_lr
    if settings.lr_decay_style == "WSD":
        span, shape = settings.lr_wsd_decay_iters or 0, WSD_STYLES[settings.lr_wsd_decay_style]
    else:
        span, shape = end - settings.lr_warmup_iters, WSD_STYLES[settings.lr_decay_style]
    left = 1.0 if step <= end - span else shape(1 - (end - step) / span)
    return settings.min_lr + left * (settings.lr - settings.min_lr)


def check_schedule(settings: OptimizerSettings) -> None:
    """Refuse a schedule whose parts do not fit into each other.

    Raises:
        RuntimeFailure: naming the setting, both numbers, and what would be right.
    """
    style, end, warm_up = settings.lr_decay_style, settings.decay_end, settings.lr_warmup_iters
    length = (
        f"{end} iterations of the schedule ({'lr_decay_iters' if settings.lr_decay_iters else 'the run'})"
    )
    if settings.min_lr > settings.lr:
        raise RuntimeFailure(
            f"min_lr {settings.min_lr:g} is above lr {settings.lr:g}; the rate falls from lr to min_lr"
        )
    if warm_up >= end:
        raise RuntimeFailure(
            f"lr_warmup_iters {warm_up} is not below the {length}; lower it, or give a larger lr_decay_iters"
        )
    if style != "WSD":
        if settings.lr_wsd_decay_iters is not None:
            raise RuntimeFailure(f"lr_wsd_decay_iters belongs to lr_decay_style WSD, not {style}; drop it")
        return
    span = settings.lr_wsd_decay_iters
    if span is None:
        raise RuntimeFailure(
            "lr_decay_style WSD needs lr_wsd_decay_iters: in how many iterations at the end the rate falls"
        )
    if warm_up + span > end:
        told = f"{span}" if not warm_up else f"{span} after lr_warmup_iters {warm_up}"
        raise RuntimeFailure(f"lr_wsd_decay_iters {told} is more than the {length}; at most {end - warm_up}")


def resumed_schedule(
    saved: Mapping[str, object], given: OptimizerSettings, override: bool
) -> tuple[OptimizerSettings, list[str]]:
    """The settings a resumed run goes on with, and what to tell about it.

    `saved` is the checkpoint's `OptimizerSettings.to_json()`, `given` what the recipe says now. The schedule is
    the saved one as a whole, or with `override` the given one as a whole, never half of each. A run that is made longer
    keeps its decay, which then ends before the run does. All else is as given.

    Raises:
        RuntimeFailure: `saved` cannot be read, or the schedule with `override` does not fit the run.
    """
    before = OptimizerSettings.from_json(saved)
    old, new = _schedule(before), _schedule(given)
    changed = [name for name in SCHEDULE if old[name] != new[name] and _matters(name, before, given)]
    notices = []
    if override:
        check_schedule(given)
        if changed:
            texts = ", ".join(f"{name} {_text(new[name])} (was {_text(old[name])})" for name in changed)
            notices.append(f"learning rate: the recipe's schedule replaces the saved one: {texts}")
        settings = given
    else:
        if changed:
            texts = ", ".join(f"{name} {_text(old[name])} (not {_text(new[name])})" for name in changed)
            notices.append(
                f"learning rate: the saved schedule goes on, and new values in the recipe are ignored: {texts}; "
                "checkpoint.override_lr_schedule=true takes them"
            )
        settings = replace(
            given,
            lr=before.lr,
            min_lr=before.min_lr,
            lr_decay_style=before.lr_decay_style,
            lr_warmup_iters=before.lr_warmup_iters,
            lr_decay_iters=before.decay_end,
            lr_wsd_decay_iters=before.lr_wsd_decay_iters,
            lr_wsd_decay_style=before.lr_wsd_decay_style,
        )
    for name in ("name", "beta1", "beta2", "eps", "weight_decay", "clip_grad"):
        was, now = getattr(before, name), getattr(given, name)
        if (was or 0) != (now or 0):
            called = "optimizer" if name == "name" else name
            notices.append(f"{called}: {_text(now)} from the recipe replaces the saved {_text(was)}")
    return settings, notices


def _schedule(settings: OptimizerSettings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in SCHEDULE} | {"lr_decay_iters": settings.decay_end}


def _matters(name: str, before: OptimizerSettings, given: OptimizerSettings) -> bool:
    """Whether a setting has an effect in one of the two schedules."""
    styles = {before.lr_decay_style, given.lr_decay_style}
    if name in ("min_lr", "lr_decay_iters"):
        return styles != {"constant"}
    return not name.startswith("lr_wsd") or "WSD" in styles


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
