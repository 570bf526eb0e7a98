"""`hetero-megatron plot`: a run's documents, strategies and step times, from its folder (paper Figure 18)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero_megatron.errors import RecipeError
from hetero_megatron.metrics import METRICS, RUN, kept_lines
from hetero_megatron.run_picture import ShownStrategy, draw_run

MOST = 10**9


def run(folder: Path, output: Path) -> None:
    """Draw the run of a folder.

    Raises:
        RecipeError: the folder holds no steps of a run, or the picture cannot be written.
    """
    steps = read_steps(folder)
    draw_run(steps, strategies_of(read_run(folder), steps), output, _title(folder, steps))
    print(f"{len(steps)} steps drawn into {output}")


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, each iteration once.

    Raises:
        RecipeError: there are none.
    """
    try:
        steps = [json.loads(line) for line in kept_lines(folder / METRICS, MOST)]
    except OSError as error:
        raise RecipeError(f"{folder / METRICS} cannot be read: {error.strerror}") from error
    if not steps:
        raise RecipeError(
            f"{folder / METRICS} has no steps of a run; give the folder of one that has trained"
        )
    return steps


def read_run(folder: Path) -> Mapping[str, Any]:
    """What run.json says, nothing where it is missing."""
    try:
        found = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def strategies_of(run: Mapping[str, Any], steps: list[dict[str, Any]]) -> list[ShownStrategy]:
    """The strategies of a run by number."""
    texts = str(run.get("strategy", "")).split("; ")
    several = (run.get("recipe") or {}).get("strategy", {}).get("several")
    if several and len(several) == len(texts) > 1:
        return [
            ShownStrategy(each["name"], text.removeprefix(f"{each['name']} "), each.get("max_length"))
            for each, text in zip(several, texts, strict=True)
        ]
    named = {step["strategy_number"]: step["strategy"] for step in steps if "strategy_number" in step}
    if named:
        return [ShownStrategy(named.get(number, ""), "") for number in range(max(named) + 1)]
    return [ShownStrategy("", texts[0])]


def _title(folder: Path, steps: list[dict[str, Any]]) -> str:
    samples = steps[-1]["consumed_samples"] - steps[0]["first_sample"]
    what = "documents" if "lengths" in steps[0] else "samples"
    return f"{folder.resolve().name}: {len(steps)} steps, {samples:,} {what}"
