"""A strategy as the `strategy` section of a recipe: what `plan -o` writes and a recipe reads back (DESIGN 5)."""

from collections.abc import Mapping, Sequence
from io import StringIO

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from hetero_megatron.planner.chooser import NamedStrategy
from hetero_megatron.strategy import Pipeline, Stage, Strategy


def strategy_section(strategy: Strategy) -> dict[str, object]:
    """The section as plain values, for JSON too; what is at its default is left out."""
    section: dict[str, object] = {"zero": strategy.zero, "schedule": strategy.schedule}
    if not strategy.sequence_parallel:
        section["sequence_parallel"] = False
    if strategy.context_parallel != "ring":
        section["context_parallel"] = strategy.context_parallel
    if strategy.offload_optimizer:
        section["offload_optimizer"] = True
    if strategy.idle_ranks:
        section["idle_ranks"] = spans(strategy.idle_ranks)
    section["pipelines"] = [_pipeline(pipeline) for pipeline in strategy.pipelines]
    return section


def strategy_yaml(strategy: Strategy, comment: str = "") -> str:
    """`strategy:` and its section as YAML, a stage per line, as the shipped recipes write it."""
    return _written({"strategy": _readable(strategy_section(strategy), strategy)}, comment)


def strategies_yaml(named: Sequence[NamedStrategy], comment: str = "") -> str:
    """`strategy:` as a list of named strategies, which a run switches between."""
    entries = CommentedSeq(
        _readable(section, each.strategy)
        for each, section in zip(named, strategies_section(named), strict=True)
    )
    return _written({"strategy": entries}, comment)


def strategies_section(named: Sequence[NamedStrategy]) -> list[dict[str, object]]:
    """The list as plain values."""
    return [
        {
            "name": each.name,
            **({} if each.max_length is None else {"max_length": each.max_length}),
            **strategy_section(each.strategy),
        }
        for each in named
    ]


def _readable(values: Mapping[str, object], strategy: Strategy) -> CommentedMap:
    """A section with a stage per line."""
    section = CommentedMap(values)
    pipelines = CommentedSeq()
    for pipeline in strategy.pipelines:
        entry = CommentedMap(_pipeline(pipeline))
        stages = CommentedSeq()
        for stage in pipeline.stages:
            line = CommentedMap(_stage(stage))
            line.fa.set_flow_style()
            stages.append(line)
        entry["stages"] = stages
        pipelines.append(entry)
    section["pipelines"] = pipelines
    return section


def _written(values: object, comment: str) -> str:
    text = StringIO()
    writer = YAML()
    writer.width = 200
    writer.dump(values, text)
    return "".join(f"# {line}\n" for line in comment.splitlines()) + text.getvalue()


def spans(numbers: tuple[int, ...]) -> object:
    """`0-3` for a run, a number for one, a list of both for more, in the given order."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    found = [first if first == last else f"{first}-{last}" for first, last in runs]
    return found[0] if len(found) == 1 else found


def _pipeline(pipeline: Pipeline) -> dict[str, object]:
    return {
        "micro_batches": pipeline.micro_batches,
        "micro_batch_size": pipeline.micro_batch_size,
        **({} if pipeline.max_tokens is None else {"max_tokens": pipeline.max_tokens}),
        "stages": [_stage(stage) for stage in pipeline.stages],
    }


def _stage(stage: Stage) -> dict[str, object]:
    entry: dict[str, object] = {"ranks": spans(stage.ranks)}
    ranges = [f"{first}-{last}" if last > first else first for first, last in stage.chunks]
    if ranges:
        entry["layers"] = ranges[0] if len(ranges) == 1 else ", ".join(map(str, ranges))
    sizes = stage.tensor_parallel_sizes
    if len(set(sizes)) > 1:
        entry["tp"] = list(sizes)
    elif len(sizes) > 1:
        entry["cp"] = len(sizes)
    if stage.recompute:
        entry["recompute"] = _recompute(stage)
    if stage.offload:
        entry["offload"] = True
    return entry


def _recompute(stage: Stage) -> object:
    if len(stage.recompute) == 1 and stage.recompute[0].layers is None:
        return stage.recompute[0].kind
    ranges: dict[str, list[str]] = {}
    for entry in stage.recompute:
        first, last = entry.layers or (stage.layer_numbers[0], stage.layer_numbers[-1])
        ranges.setdefault(entry.kind, []).append(f"{first}-{last}" if last > first else str(first))
    return {kind: ", ".join(own) for kind, own in ranges.items()}
