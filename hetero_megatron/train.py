"""The trainer: from a recipe to a run on real processes (DESIGN §5, §6).

`torchrun --nproc-per-node N -m hetero_megatron.train RECIPE` runs it under a launcher; `hetero-megatron pretrain`
starts the local ranks itself.
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from rich.console import Console

from hetero_megatron.data.batch import pack
from hetero_megatron.data.dispatch import MicroBatchRows, deal
from hetero_megatron.data.rows import PackedRows
from hetero_megatron.errors import HeteroError, LayerError, StrategyError
from hetero_megatron.graph.trace import trace
from hetero_megatron.layers.initial import initial_value, initial_values
from hetero_megatron.layers.kernels import Facts, Kernels, choose_all
from hetero_megatron.models.config import LlamaConfig, flops_per_token
from hetero_megatron.models.llama import Llama
from hetero_megatron.program import Program
from hetero_megatron.recipe import Recipe, load_recipe
from hetero_megatron.report import RunProgress, RunSummary, log_line, short_strategy, strategy_table
from hetero_megatron.runtime.agree import agree_on_kernels
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.launch import (
    Rendezvous,
    end_at_once,
    fork_ranks,
    preload,
    use_batch_scheduling,
)
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session, StepResult
from hetero_megatron.runtime.state import ParameterSlot
from hetero_megatron.runtime.world import World

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Run:
    """A recipe that was checked and made ready; nothing has been started."""

    recipe: Recipe
    config: LlamaConfig
    model: Llama
    program: Program
    rows: PackedRows
    settings: OptimizerSettings
    device: str
    kernels: Kernels

    def dealt(self, rank: int) -> tuple[MicroBatchRows, ...]:
        """Row offsets of each micro-batch of this rank's pipeline in every step."""
        number, _ = self.program.pipeline_of(rank)
        pipelines = self.program.strategy.pipelines
        sizes = [(pipeline.micro_batches, pipeline.micro_batch_size) for pipeline in pipelines]
        return deal(self.recipe.training.global_batch_size, sizes)[number]

    def batches(self, rank: int, iteration: int, device: torch.device) -> list[MicroBatch]:
        """This rank's micro-batches of step `iteration` (from 0); only its own pipeline's rows are read."""
        number, _ = self.program.pipeline_of(rank)
        first = iteration * self.recipe.training.global_batch_size
        multiple = self.program.token_multiple(number)
        return [
            pack([piece for row in rows for piece in self.rows.sample(first + row)], multiple, device)
            for rows in self.dealt(rank)
        ]


def prepare(recipe: Recipe) -> Run:
    """Everything that can be refused is refused here, before the first process.

    Raises:
        HeteroError: whatever does not do, with the recipe's file.
    """
    with recipe.named():
        config, training = recipe.make_config(), recipe.training
        model = Llama(config)
        program = build_program(recipe, model)
        rows = PackedRows(recipe.open_corpus(), training.seed, training.seq_length)
        device = _device_type(program)
        kernels = _kernels(recipe, config, device)
        run = Run(recipe, config, model, program, rows, _settings(recipe), device, kernels)
        recipe.make_folder()
        return run


def build_program(recipe: Recipe, model: Llama) -> Program:
    """The Program of a recipe's model and strategy on its cluster."""
    return Program.build(trace(model), recipe.make_strategy(), model.config.facts, recipe.make_cluster())


def _settings(recipe: Recipe) -> OptimizerSettings:
    t = recipe.training
    return OptimizerSettings(
        name=t.optimizer,
        lr=t.lr,
        min_lr=t.min_lr,
        lr_decay_style=t.lr_decay_style,
        lr_warmup_iters=t.lr_warmup_iters,
        train_iters=t.train_iters or 0,
        beta1=t.adam_beta1,
        beta2=t.adam_beta2,
        eps=t.adam_eps,
        weight_decay=t.weight_decay,
        clip_grad=t.clip_grad,
    )


def _kernels(recipe: Recipe, config: LlamaConfig, device: str) -> Kernels:
    """The kernels of a run; nothing is imported yet.

    Raises:
        LayerError: one that the recipe asks for cannot run here.
    """
    strategy = recipe.make_strategy()
    if strategy.has_ring and recipe.kernels.attention != "auto":
        raise LayerError(
            f"kernels.attention: {recipe.kernels.attention} has no ring form, and pipelines with cp > 1 would pass it "
            "over; leave it auto, or use context_parallel ulysses"
        )
    adam_device = "cpu" if strategy.offload_optimizer else device
    dtype, facts = DTYPES[recipe.training.precision], Facts(config.head_size)
    optimizer = recipe.training.optimizer
    return choose_all(recipe.kernels.model_dump(), device, dtype, facts, adam_device, optimizer)


def _device_type(program: Program) -> str:
    """`cpu` for a CPU cluster; a cluster of GPUs needs GPUs on this machine.

    Raises:
        StrategyError: the recipe's cluster has GPUs and this machine has none.
    """
    kind = program.cluster.kind(program.strategy.ranks[0]).name
    if kind == "cpu":
        return "cpu"
    # is_available() starts CUDA in this process, after which no forked rank could use it; counting does not.
    if not torch.cuda.device_count():
        raise StrategyError(
            f"cluster: the recipe is for {kind} devices and this machine has no GPU that torch can use; "
            "`explain` and `switch` work without one, and a recipe without `cluster` runs on this machine's CPU"
        )
    return "cuda"


def start_session(run: Run, world: World) -> Session:
    """A Session with layout-independent initial values (DESIGN decision 5)."""
    specs, seed = initial_values(run.model), run.recipe.training.seed

    def initial(slot: ParameterSlot) -> torch.Tensor:
        return initial_value(
            slot.name, specs[slot.name], slot.bounds, slot.full_shape, seed, device=world.device
        )

    dtype = DTYPES[run.recipe.training.precision]
    agree_on_kernels(world, run.kernels.names)
    modules, kernels = dict(run.model.named_modules()), run.kernels.load()
    return Session(
        run.program, world, modules, initial, run.settings, dtype, kernels, run.recipe.training.bucket_size
    )


def train_rank(run: Run, world: World) -> None:
    """Train on this rank; the lowest rank writes the log and the metrics and prints the summary."""
    training, strategy = run.recipe.training, short_strategy(run.program.strategy)
    leads = world.rank == world.ranks[0]
    session = start_session(run, world)
    summary = RunSummary(flops_per_token(run.config, training.seq_length))
    folder = Path(run.recipe.output.folder)
    with (
        _metrics(folder if leads else None) as metrics,
        RunProgress(run.settings.train_iters, leads) as progress,
    ):
        for iteration in range(run.settings.train_iters):
            batches = run.batches(world.rank, iteration, world.device)
            result = session.step(batches, skip_nonfinite=training.nonfinite == "skip")
            summary.add(result)
            progress.advance(result)
            if metrics is not None:
                print(json.dumps(_metric(result)), file=metrics, flush=True)
            if result.skipped or result.iteration == 1 or result.iteration % training.log_interval == 0:
                sizes = (run.settings.train_iters, training.global_batch_size, session.skipped_iterations)
                progress.log(log_line(result, *sizes, strategy))
    if leads:
        summary.print(folder)


@contextlib.contextmanager
def _metrics(folder: Path | None) -> Iterator[TextIO | None]:
    """`metrics.jsonl` in the run folder, or nothing on a rank that does not lead."""
    if folder is None:
        yield None
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        yield file


def _metric(result: StepResult) -> dict[str, float | int | str | None]:
    """One line of metrics; a loss or norm that is not finite is null, which JSON can say."""
    seconds = result.seconds["step"]
    line: dict[str, float | int | str | None] = {
        "iteration": result.iteration,
        "loss": _finite(result.loss),
        "grad_norm": _finite(result.grad_norm),
        "lr": result.lr,
        "valid_tokens": result.valid_tokens,
        "step_seconds": seconds,
        "tokens_per_second": result.valid_tokens / seconds,
    }
    return line | ({"skipped": result.skipped} if result.skipped else {})


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def start(run: Run, environment: Mapping[str, str]) -> int:
    """Train: as one process of the launcher that the environment tells of, or with ranks of its own.

    Returns:
        The exit code, 0 when every rank succeeded.

    Raises:
        StrategyError: there are not as many processes or GPUs as the strategy has ranks.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        with run.recipe.named():
            pretrain_under_launcher(
                run,
                int(environment["RANK"]),
                int(environment.get("LOCAL_RANK", "0")),
                int(environment["WORLD_SIZE"]),
            )
        return 0
    with run.recipe.named():
        return pretrain(run)


def pretrain(run: Run) -> int:
    """Start the local ranks and train; returns the exit code, 0 when every rank succeeded.

    Raises:
        StrategyError: this machine has fewer GPUs than the strategy has ranks.
    """
    torch.set_num_threads(1)
    strategy = run.program.strategy
    ranks = strategy.ranks
    _check_gpus(run.device, len(ranks))
    preload(any(stage.recompute for pipeline in strategy.pipelines for stage in pipeline.stages))
    _announce(run)

    def main(rendezvous: Rendezvous) -> None:
        world = _join(run, rendezvous, rendezvous.index)
        train_rank(run, world)
        world.leave()

    return fork_ranks(len(ranks), main, ranks=ranks)


def pretrain_under_launcher(run: Run, index: int, local_index: int, processes: int) -> None:
    """Train as one process of a launcher such as torchrun, which started one process per rank.

    `index` counts all processes, `local_index` those of this machine.

    Raises:
        StrategyError: there are not as many processes as ranks, or fewer GPUs than processes on this machine.
    """
    ranks = run.program.strategy.ranks
    if processes != len(ranks):
        raise StrategyError(
            f"{processes} processes were started, the strategy has {len(ranks)} ranks; start one per rank"
        )
    # A launcher may show each process one GPU of its own.
    if torch.cuda.device_count() > 1:
        _check_gpus(run.device, local_index + 1)
    if run.device == "cpu":
        torch.set_num_threads(1)
        use_batch_scheduling()
    with end_at_once(ranks[index]):
        world = _join(run, None, local_index)
        if world.rank == world.ranks[0]:
            _announce(run)
        train_rank(run, world)
        world.leave()


def _join(run: Run, rendezvous: Rendezvous | None, local_index: int) -> World:
    """Meet the other ranks, once the kernels of this one are found to load."""
    device = _device(run.device, local_index)
    run.kernels.load()
    return World.join(rendezvous, run.program.strategy.ranks, device)


def _announce(run: Run) -> None:
    """Print what is fixed before the first step: who does what, and with which kernels."""
    console = Console()
    console.print(strategy_table(run.program.strategy))
    console.print(str(run.kernels), soft_wrap=True, markup=False, highlight=False)
    if run.kernels.adam is None:
        console.print(f"optimizer: {run.settings.name}", highlight=False)
    if run.program.strategy.has_ring:
        console.print("ring attention, where cp > 1: torch's kernels block by block", highlight=False)


def _check_gpus(kind: str, needed: int) -> None:
    """Two ranks on one GPU would fail late, deep in the communication library."""
    if kind == "cuda" and torch.cuda.device_count() < needed:
        raise StrategyError(
            f"{needed} ranks on this machine need a GPU each, and it has {torch.cuda.device_count()}; "
            "start the ranks of several machines with torchrun"
        )


def _device(kind: str, index: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def main(arguments: Sequence[str]) -> int:
    """`python -m hetero_megatron.train RECIPE [KEY=VALUE ...]`, alone or under torchrun."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print("usage: python -m hetero_megatron.train RECIPE [KEY=VALUE ...]", file=sys.stderr)
        return 2
    try:
        return start(prepare(load_recipe(arguments[0], arguments[1:])), os.environ)
    except KeyboardInterrupt:
        return 130
    except HeteroError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
