"""`hetero-megatron explain`: pipelines, groups, and the communication of every Reshard of a recipe (paper §5, §6)."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hetero_megatron.cli.context import AttentionLine, attention_lines
from hetero_megatron.cli.memory import memory_json, print_memory
from hetero_megatron.cluster import ranges_text
from hetero_megatron.comm.steps import CommPlan
from hetero_megatron.errors import RecipeError, StrategyError
from hetero_megatron.graph.tied import shared_parameters
from hetero_megatron.memory import RankMemory, estimate
from hetero_megatron.models.llama import Llama
from hetero_megatron.pipeline.action import spell_steps
from hetero_megatron.pipeline.schedule_file import write_csv
from hetero_megatron.pipeline.timing import clock
from hetero_megatron.program import Program
from hetero_megatron.recipe import Recipe
from hetero_megatron.report import layer_text, rank_text, strategy_table
from hetero_megatron.run import DTYPES, build_program
from hetero_megatron.strategy import Stage

ACTIVATION, GRADIENT = "activation", "gradient"
_FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class ReshardLine:
    """One Reshard: operators per subgroup, and bytes that all ranks together send.

    An activation's bytes are those of one micro-batch of every pipeline; a gradient's those of one step, in FP32.
    Backward is an activation's gradient, and under ZeRO-1 a parameter's way back from its cut states, in its precision.
    """

    name: str
    kind: str
    operators: tuple[str, ...]
    bytes: int
    backward_operators: tuple[str, ...]
    backward_bytes: int
    ranks: tuple[int, ...]


def run(
    recipe: Recipe,
    rank: int | None,
    as_json: bool,
    schedule: bool = False,
    plan: Path | None = None,
    schedule_csv: Path | None = None,
    memory: bool = False,
) -> None:
    """Print what the recipe's strategy means; with `rank`, only what that rank takes part in.

    `schedule` adds the time grid of a step, `memory` what every rank's device has to hold. The annotation plan is
    written to `plan`, the order of forwards and backwards to `schedule_csv`.

    Raises:
        HeteroError: the recipe cannot be turned into a Program, or the rank is in no pipeline.
    """
    with recipe.named():
        program = build_program(recipe, Llama(recipe.make_config()))
        _check_rank(program, rank)
    if plan is not None:
        _write(program.plan.to_json(), plan, "--plan")
    if schedule_csv is not None:
        orders = [actions.compute for actions in program.schedule.pipelines]
        _write(write_csv(orders), schedule_csv, "--schedule-csv")
    lines = [line for line in _lines(program, recipe) if rank is None or rank in line.ranks]
    shared = _attention(program, recipe, rank)
    needs: tuple[RankMemory, ...] = ()
    if memory:
        found = estimate(program, recipe.training.seq_length, DTYPES[recipe.training.precision].itemsize)
        needs = tuple(each for each in found if rank is None or each.rank == rank)
    if as_json:
        grid = {"grid": str(program.schedule).splitlines()} if schedule else {}
        print(
            json.dumps(_as_json(program, lines, shared, rank) | grid | (memory_json(needs) if memory else {}))
        )
    else:
        _print(program, lines, shared, rank)
        if schedule:
            Console(highlight=False).print(str(program.schedule), soft_wrap=True)
        if memory:
            print_memory(needs)


def _check_rank(program: Program, rank: int | None) -> None:
    ranks = program.strategy.ranks
    if rank is not None and rank not in ranks:
        raise StrategyError(
            f"--rank: rank {rank} works in no pipeline of this strategy; "
            f"the ranks at work are {rank_text(ranks)}"
        )


def _write(text: str, path: Path, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{option}: {path} cannot be written: {error.strerror}") from error


def _lines(program: Program, recipe: Recipe) -> Iterator[ReshardLine]:
    graph, training = program.annotated.graph, recipe.training
    width, tokens = DTYPES[training.precision].itemsize, _tokens(program, training.seq_length)
    for reshard in program.reshards:
        hidden = graph.size(reshard.name, 1)
        ahead, back = reshard.forward, reshard.backward
        subgroups = len(program.plan[reshard.name].groups)
        yield ReshardLine(
            reshard.name,
            ACTIVATION,
            ahead.operators if ahead else ("Identity",) * subgroups,
            _activation_bytes(ahead, tokens, hidden, width),
            back.operators if back else ("Identity",) * subgroups,
            _activation_bytes(back, tokens, hidden, width),
            program.plan[reshard.name].ranks if ahead is None else ahead.ranks,
        )
    for name, plan in program.posts.items():
        shape, back = graph.parameter_shape(name), program.pres[name]
        sent = sum(plan.bytes_sent(shape, _FP32_BYTES).values())
        gathered = sum(back.bytes_sent(shape, width).values())
        operators = back.operators if program.strategy.zero else ()
        yield ReshardLine(name, GRADIENT, plan.operators, sent, operators, gathered, plan.ranks)


def _attention(program: Program, recipe: Recipe, rank: int | None) -> list[AttentionLine]:
    """What context-parallel attention sends, in all pipelines or in the one of `rank`."""
    width = DTYPES[recipe.training.precision].itemsize
    found = attention_lines(program, recipe.training.seq_length, recipe.make_config().head_size, width)
    own = None if rank is None else program.pipeline_of(rank)[0]
    return [line for line in found if own is None or line.pipeline == own]


def _tokens(program: Program, seq_length: int) -> list[int]:
    """Of one micro-batch, by subgroup: context-parallel parts share the tokens of their pipeline."""
    return [
        max(1, pipeline.tokens(seq_length) * share // sum(pipeline.token_shares))
        for pipeline in program.strategy.pipelines
        for share in pipeline.token_shares
    ]


def _activation_bytes(plan: CommPlan | None, tokens: Sequence[int], hidden: int, width: int) -> int:
    """Every subgroup has its own number of tokens, so its ranks are counted with them."""
    if plan is None:
        return 0
    sent = 0
    for count in set(tokens):
        by_rank = plan.bytes_sent((count * plan.src.hsize, hidden), width)
        for rank, amount in by_rank.items():
            subgroup = plan.src.subgroup_of(rank)
            if subgroup is not None and tokens[subgroup] == count:
                sent += amount
    return sent


def _as_json(
    program: Program, lines: Sequence[ReshardLine], shared: Sequence[AttentionLine], rank: int | None
) -> dict[str, object]:
    found: dict[str, object] = {
        "pipelines": [
            {
                "micro_batches": pipeline.micro_batches,
                "micro_batch_size": pipeline.micro_batch_size,
                **({} if pipeline.max_tokens is None else {"max_tokens": pipeline.max_tokens}),
                "stages": [
                    {
                        "ranks": list(stage.ranks),
                        "layers": list(map(list, stage.chunks)) if len(stage.chunks) > 1 else _one(stage),
                        "tp": stage.tensor_parallel_size,
                        "cp": stage.context_parallel_size,
                    }
                    for stage in pipeline.stages
                ],
            }
            for pipeline in program.strategy.pipelines
        ],
        "ranks": list(program.strategy.ranks),
        "idle_ranks": list(program.strategy.idle_ranks),
        "sequences_per_step": program.strategy.rows_per_step,
        "schedule": program.strategy.schedule,
        "zero": program.strategy.zero,
        "groups": [list(group) for group in program.groups if rank is None or rank in group],
        "reshards": [
            {
                "name": line.name,
                "kind": line.kind,
                "operators": list(line.operators),
                "bytes": line.bytes,
                "backward_operators": list(line.backward_operators),
                "backward_bytes": line.backward_bytes,
            }
            for line in lines
        ],
        "context_parallel": [asdict(line) for line in shared],
        "annotations": json.loads(program.plan.to_json())["annotations"],
    }
    if rank is not None:
        number, stage = program.pipeline_of(rank)[0], program.stage_of(rank)
        found |= {
            "rank": rank,
            "pipeline": number,
            "stage": stage,
            "actions": spell_steps(program.schedule.steps(number, stage)),
        }
    return found


def _one(stage: Stage) -> list[int] | None:
    return list(stage.chunks[0]) if stage.chunks else None


def _print(
    program: Program, lines: Sequence[ReshardLine], shared: Sequence[AttentionLine], rank: int | None
) -> None:
    console = Console(highlight=False)
    strategy = program.strategy
    console.print(strategy_table(strategy))
    layers = sum(1 for name in program.annotated.graph.reshards if name.endswith(".entry"))
    _say(
        console,
        f"{len(strategy.ranks)} rank{'s' * (len(strategy.ranks) > 1)}, {layers} layers per pipeline, "
        f"{strategy.rows_per_step} sequences per step, schedule {strategy.schedule}, zero {strategy.zero}",
    )
    groups = _groups(program, rank)
    whose = "" if rank is None else f" of rank {rank}"
    _say(console, f"{len(groups)} process groups for collectives{whose}: {' '.join(groups) or 'none'}")
    timing = clock(
        program.schedule.pipelines,
        lambda pipeline, stage, kind: _units(program, pipeline, stage, kind),
        chunk_share=lambda pipeline, stage, chunk: _share(program, pipeline, stage, chunk),
    )
    _say(
        console,
        f"bubble: {100 * timing.bubble_share:.1f}% (forward 1 and backward 2 per layer, over the peak FLOP/s of a "
        "stage's ranks; no communication)",
    )
    if rank is not None:
        _print_rank(console, program, rank)
    parts = any(pipeline.context_parallel_size > 1 for pipeline in strategy.pipelines)
    if len(strategy.pipelines) > 1 or parts:
        each = ", those of their context-parallel parts one after the other" if parts else ""
        _say(
            console,
            f"operators of pipelines 0, 1, ... are listed in this order{each}, or once where they are equal",
        )
    for name in sorted(shared_parameters(program.annotated.graph)):
        _say(console, _tied_text(program, name))
    unit = "MB (1e6 bytes) that all ranks send together, each layer by itself"
    _print_lines(
        console,
        f"activations, for one micro-batch of every pipeline; {unit}",
        [line for line in lines if line.kind == ACTIVATION],
    )
    for text in _attention_texts(shared):
        _say(console, text)
    if any(stage.recompute for pipeline in strategy.pipelines for stage in pipeline.stages):
        _say(console, "what is recomputed is sent once more in the backward pass, and not counted here")
    back = " and parameters back from cut optimizer states" if strategy.zero else ""
    _print_lines(
        console,
        f"gradients (FP32){back}, per step; {unit}",
        [line for line in lines if line.kind == GRADIENT],
    )


def _print_lines(console: Console, title: str, lines: Sequence[ReshardLine]) -> None:
    """A table of the Reshards that send something, and the names of the others."""
    idle = [line for line in lines if {*line.operators, *line.backward_operators} == {"Identity"}]
    _say(console, title)
    if len(idle) < len(lines):
        console.print(_table([line for line in lines if line not in idle]))
    names: dict[str, list[str]] = {}
    for name, layers, _ in _folded(idle):
        names.setdefault(layers, []).append(name)
    if names:
        parts = (
            f"{', '.join(own)}{f' in layers {layers}' if layers else ''}" for layers, own in names.items()
        )
        _say(console, f"Identity, nothing is sent: {'; '.join(parts)}")


def _say(console: Console, text: str) -> None:
    """A sentence: wrapped for people, in one line for other programs."""
    console.print(text, soft_wrap=not console.is_terminal)


def _attention_texts(lines: Sequence[AttentionLine]) -> Iterator[str]:
    """A sentence per line; pipelines that are alike share one."""
    alike: dict[AttentionLine, list[int]] = {}
    for line in lines:
        alike.setdefault(replace(line, pipeline=0), []).append(line.pipeline)
    for line, pipelines in alike.items():
        which = f"in pipeline {pipelines[0]}"
        if len(pipelines) > 1:
            which = f"in each of pipelines {ranges_text(pipelines)}"
        yield (
            f"{line.mode} attention over {line.parts} parts {which} sends {_megabytes(line.forward_bytes)} MB forward "
            f"and {_megabytes(line.backward_bytes)} MB backward, per micro-batch of rows that are one document each, "
            f"in each layer of {ranges_text(line.layers)}"
        )


def _tied_text(program: Program, name: str) -> str:
    users = " and ".join(node.name for node in program.annotated.graph.nodes if name in node.inputs)
    homes = [rank_text(group.ranks) for group in program.plan[name].groups]
    order = ", and its operators are listed in this order" if len(homes) > 1 else ""
    return f"{users} share {name}, which lives on {' '.join(homes)}{order}"


def _groups(program: Program, rank: int | None) -> list[str]:
    return [rank_text(group) for group in program.groups if rank is None or rank in group]


def _units(program: Program, pipeline: int, stage: int, kind: str) -> float:
    part = program.strategy.pipelines[pipeline].stages[stage]
    rows = program.strategy.pipelines[pipeline].micro_batch_size
    speed = sum(program.cluster.kind(rank).flops for rank in part.ranks)
    return (1 if kind == "F" else 2) * rows * max(1, len(part.layer_numbers)) / speed


def _share(program: Program, pipeline: int, stage: int, chunk: int) -> float:
    """What part of its stage's layers a chunk holds."""
    part = program.strategy.pipelines[pipeline].stages[stage]
    if len(part.chunks) < 2:
        return 1.0
    first, last = part.chunks[chunk]
    return (last - first + 1) / len(part.layer_numbers)


def _print_rank(console: Console, program: Program, rank: int) -> None:
    number, stage = program.pipeline_of(rank)[0], program.stage_of(rank)
    part = program.strategy.pipelines[number].stages[stage]
    count = len(program.strategy.pipelines[number].stages)
    executable, graph = program.executable(rank), program.annotated.graph
    elements = 0
    for bound in executable.post:
        region = program.plan[bound.name].region(rank).bounds(graph.parameter_shape(bound.name))
        local = 1
        for lo, hi in region:
            local *= hi - lo
        elements += local
    _say(
        console,
        f"rank {rank}: pipeline {number}, stage {stage} ({layer_text(part, stage == 0, stage == count - 1)}), "
        f"{elements:,} parameters, {sum(len(chunk.nodes) for chunk in executable.chunks)} operators",
    )
    _say(console, f"its step: {spell_steps(program.schedule.steps(number, stage))}")


def _table(lines: Sequence[ReshardLine]) -> Table:
    """Lines of consecutive layers with the same operators and bytes are folded into one."""
    table = Table()
    table.add_column("Reshard", no_wrap=True)
    table.add_column("layers")
    both = any(line.backward_operators for line in lines)
    ways = ("forward", "backward") if lines[0].kind == ACTIVATION else ("gradient", "parameter")
    table.add_column(ways[0] if both else "operators")
    table.add_column("MB", justify="right")
    if both:
        table.add_column(ways[1])
        table.add_column("MB", justify="right")
    for name, layers, line in _folded(lines):
        cells = [name, layers, _operators(line.operators), _megabytes(line.bytes)]
        if line.backward_operators:
            cells += [_operators(line.backward_operators), _megabytes(line.backward_bytes)]
        table.add_row(*cells)
    return table


def _folded(lines: Sequence[ReshardLine]) -> list[tuple[str, str, ReshardLine]]:
    """Name inside the layer, layers (as `0-14, 17`, or ""), and one line for all that are alike."""
    alike: dict[tuple[object, ...], list[tuple[str, ReshardLine]]] = {}
    for line in lines:
        layer = re.fullmatch(r"layers\.(\d+)\.(.+)", line.name)
        number, rest = (layer[1], layer[2]) if layer else ("", line.name)
        key = (rest, bool(layer), line.operators, line.bytes, line.backward_operators, line.backward_bytes)
        alike.setdefault(key, []).append((number, line))
    folded = []
    for (rest, in_layers, *_), members in alike.items():
        layers = ranges_text([int(number) for number, _ in members]) if in_layers else ""
        folded.append((str(rest), layers, members[0][1]))
    return folded


def _operators(operators: Sequence[str]) -> str:
    """Once where all are equal; `AR, Identity x3` for three of the same one after the other."""
    runs = [(operator, len(list(same))) for operator, same in groupby(operators)]
    if len(runs) == 1:
        return operators[0]
    return ", ".join(
        operator + (f" x{count}" if count > 2 else ", " + operator if count == 2 else "")
        for operator, count in runs
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.3f}" if count else "-"
