"""The trainer: from a recipe to a run on real processes (DESIGN §5, §6).

`torchrun --nproc-per-node N -m hetero_megatron.train RECIPE` runs it under a launcher; `hetero-megatron pretrain`
starts the local ranks itself.
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from hetero_megatron.data.loader import Loader
from hetero_megatron.errors import HeteroError, StrategyError
from hetero_megatron.journal import Journal, strategy_texts
from hetero_megatron.layers.initial import initial_value, initial_values
from hetero_megatron.loop import Loop, Memory
from hetero_megatron.models.hf_weights import hf_initial
from hetero_megatron.models.llama import Llama
from hetero_megatron.pace import Pace
from hetero_megatron.recipe import Recipe, load_recipe
from hetero_megatron.report import strategy_table
from hetero_megatron.run import DTYPES, Run, prepare
from hetero_megatron.runtime.agree import agree_on_kernels
from hetero_megatron.runtime.checkpoint import Saver
from hetero_megatron.runtime.launch import (
    Rendezvous,
    end_at_once,
    fork_ranks,
    preload,
    use_batch_scheduling,
)
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.state import ParameterSlot
from hetero_megatron.runtime.stopping import StopRequest
from hetero_megatron.runtime.switcher import Switcher
from hetero_megatron.runtime.world import World
from hetero_megatron.stragglers import Watch
from hetero_megatron.tracing import Tracer
from hetero_megatron.turns import Turns
from hetero_megatron.watch import SkipWatch, SpikeWatch

if TYPE_CHECKING:
    from hetero_megatron.elastic import Place


def start_session(run: Run, world: World) -> Session:
    """A Session with the weights of a checkpoint, of a Hugging Face folder, or with initial ones by name and index."""
    training = run.recipe.training
    agree_on_kernels(world, run.kernels.names)
    session = Session(
        run.program,
        world,
        dict(run.model.named_modules()),
        initial_of(run, world.device),
        run.settings,
        DTYPES[training.precision],
        run.kernels.load(),
        training.bucket_size,
    )
    _restore(run, session)
    return session


def start_switcher(run: Run, world: World) -> Switcher:
    """A session for each of several strategies, as `start_session`; the first one's has the weights."""
    training = run.recipe.training
    agree_on_kernels(world, run.kernels.names)
    switcher = Switcher(
        run.programs,
        world,
        lambda: dict(Llama(run.config).named_modules()),
        initial_of(run, world.device),
        run.settings,
        DTYPES[training.precision],
        run.kernels.load(),
        training.bucket_size,
        share_states=True,
    )
    switcher.prepare()
    if switcher.session is not None:
        _restore(run, switcher.session)
    return switcher


def _restore(run: Run, session: Session) -> None:
    if run.start.saved:
        run.start.saved.restore(session, say=session.world.once(print))


def initial_of(run: Run, device: torch.device) -> Callable[[ParameterSlot], torch.Tensor]:
    """The first value of a shard, which no strategy changes (DESIGN decision 5)."""
    weights = run.recipe.open_weights()
    if run.start.saved is not None:
        return run.start.saved.initial
    if weights is not None:
        return hf_initial(weights)
    specs, seed = initial_values(run.model), run.recipe.training.seed

    def initial(slot: ParameterSlot) -> torch.Tensor:
        return initial_value(slot.name, specs[slot.name], slot.bounds, slot.full_shape, seed, device=device)

    return initial


def train_rank(run: Run, world: World, loader: Loader, request: StopRequest) -> None:
    """Train on this rank; the lowest rank writes the log and the metrics and prints the summary."""
    switcher = start_switcher(run, world) if len(run.programs) > 1 else None
    session = switcher.session if switcher is not None else start_session(run, world)
    assert session is not None, "strategies that share states have the same ranks"
    with Journal.kept(run, session) as journal:
        saver = saver_of(run, session, journal)
        loop = loop_of(run, session, loader, saver, request, memory_of(run), journal)
        if switcher is not None:
            loop.turns = Turns(switcher, saver, journal, run.evaluates)
        journal.end(loop.run())


def saver_of(run: Run, session: Session, journal: Journal, forsaken: bool = False) -> Saver:
    """What saves a session into the run's folder, as the recipe says; `forsaken` saves of lost ranks are removed."""
    section = run.recipe.checkpoint
    return Saver(
        run.folder, session, section.keep_last, section.asynchronous, say=journal.say, forsaken=forsaken
    )


def loop_of(
    run: Run,
    session: Session,
    loader: Loader,
    saver: Saver,
    request: StopRequest,
    memory: Memory,
    journal: Journal,
) -> Loop:
    """The training loop that the recipe describes."""
    recipe, world = run.recipe, session.world
    pace = journal.pace = Pace(run.config)
    watch = None
    if recipe.elastic.stragglers != "ignore" and world.leads:
        watch = Watch(recipe, run.folder, run.settings.train_iters, journal.say)
    return Loop(
        session,
        loader,
        saver,
        request,
        run.settings.train_iters,
        recipe.training.nonfinite == "skip",
        memory,
        facts=facts_of(run),
        told=journal.step,
        checkpoint=recipe.checkpoint,
        evaluation=recipe.evaluation,
        held_out=run.held_out_batches(world.rank, world.device),
        tracer=Tracer.of(recipe.logging, run.start.iteration, run.settings.train_iters, journal.say),
        pace=pace,
        watch=watch,
    )


def memory_of(run: Run) -> Memory:
    """What the loop of a run begins with: anew, or what the checkpoint kept."""
    recipe, saved = run.recipe, run.start.memory
    factor = recipe.logging.spike_factor
    return Memory(
        SpikeWatch.from_json(factor, saved["spikes"]) if saved else SpikeWatch(factor),
        SkipWatch(recipe.training.nonfinite_limit, saved.get("skips", 0)),
        saved.get("consumed_tokens", 0),
        counted=run.start.iteration,
        finished=run.start.iteration,
    )


def facts_of(run: Run) -> dict[str, object]:
    """What a checkpoint says besides where the run stands."""
    return {
        "settings": run.settings.to_json(),
        "identity": run.identity,
        "model": dataclasses.asdict(run.config),
        "recipe": run.recipe.model_dump(mode="json"),
        "strategy": "; ".join(strategy_texts(run)),
    }


def start(run: Run, environment: Mapping[str, str], elastic: "Place | None" = None) -> int:
    """Train: as one process of the launcher that the environment tells of, or with ranks of its own.

    With `elastic`, ranks go on when one of them is lost; a launcher, which ends all of them then, has no part in it.

    Returns:
        The exit code, 0 when every rank succeeded.

    Raises:
        StrategyError: there are not as many processes or GPUs as the strategy has ranks.
    """
    if elastic is None and "RANK" in environment and "WORLD_SIZE" in environment:
        with run.recipe.named():
            refuse_stragglers(run.recipe, False)
            pretrain_under_launcher(
                run,
                int(environment["RANK"]),
                int(environment.get("LOCAL_RANK", "0")),
                int(environment["WORLD_SIZE"]),
            )
        return 0
    with run.recipe.named():
        refuse_stragglers(run.recipe, elastic is not None)
        if elastic is not None:
            if len(run.programs) > 1:
                raise StrategyError(
                    f"strategy: an elastic run has one strategy, and this recipe has {', '.join(run.programs)}; leave "
                    "--elastic out, or write one of them in the place of the list"
                )
            from hetero_megatron.elastic import pretrain_elastic

            return pretrain_elastic(run, elastic)
        return pretrain(run)


def refuse_stragglers(recipe: Recipe, elastic: bool) -> None:
    """Only an elastic run can change its strategy for measured speeds, and there is a plan for one strategy only.

    Raises:
        StrategyError: the recipe asks another run to.
    """
    several = recipe.strategy.several
    if recipe.elastic.stragglers != "ignore" and several is not None:
        raise StrategyError(
            f"elastic.stragglers: {recipe.elastic.stragglers} looks for one strategy, and this recipe has {len(several)} "
            "that take turns; leave it at ignore"
        )
    if recipe.elastic.stragglers == "replan" and not elastic:
        raise StrategyError(
            "elastic.stragglers: replan changes the strategy of an elastic run; start it with `pretrain --elastic`, or let "
            "the plan only be written to the run's folder with propose"
        )


def pretrain(run: Run) -> int:
    """Start the local ranks and train; returns the exit code, 0 when every rank succeeded.

    Raises:
        StrategyError: this machine has fewer GPUs than the strategy has ranks.
    """
    torch.set_num_threads(1)
    strategies = [program.strategy for program in run.programs.values()]
    ranks = strategies[0].ranks
    check_gpus(run.device, len(ranks))
    preload(any(stage.recompute for each in strategies for p in each.pipelines for stage in p.stages))
    announce(run)

    request = StopRequest()

    def main(rendezvous: Rendezvous) -> None:
        _work(run, rendezvous, ranks[rendezvous.index], rendezvous.index, request)

    with request.listening():
        return fork_ranks(len(ranks), main, ranks=ranks, request=request)


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
        check_gpus(run.device, local_index + 1)
    if run.device == "cpu":
        torch.set_num_threads(1)
        use_batch_scheduling()
    request = StopRequest()
    with end_at_once(ranks[index]), request.listening():
        if index == 0:
            announce(run)
        _work(run, None, ranks[index], local_index, request)


def _work(run: Run, rendezvous: Rendezvous | None, rank: int, local_index: int, request: StopRequest) -> None:
    """The life of one rank; its data workers are forked before it has a connection to anyone."""
    with contextlib.ExitStack() as stack:
        loader = stack.enter_context(run.loader(rank, run.start.position))
        world = _join(run, rendezvous, local_index)
        agreed = run.agreed(world)
        if agreed is not run:
            loader.close()
            # A process that has started CUDA cannot be forked any more.
            workers = 0 if run.device == "cuda" else None
            position = agreed.start.position
            loader = stack.enter_context(agreed.loader(rank, position, workers))
        train_rank(agreed, world, loader, request)
        world.leave()


def _join(run: Run, rendezvous: Rendezvous | None, local_index: int) -> World:
    """Meet the other ranks, once the kernels of this one are found to load."""
    device = device_of(run.device, local_index)
    run.kernels.load()
    return World.join(rendezvous, run.program.strategy.ranks, device)


def announce(run: Run) -> None:
    """Print what is fixed before the first step: who does what, and with which kernels."""
    console = Console()
    for name, program in run.programs.items():
        if len(run.programs) > 1:
            console.print(f"{name}:", markup=False, highlight=False)
        console.print(strategy_table(program.strategy))
    console.print(str(run.kernels), soft_wrap=True, markup=False, highlight=False)
    if run.kernels.adam is None:
        console.print(f"optimizer: {run.settings.name}", highlight=False)
    if any(program.strategy.has_ring for program in run.programs.values()):
        console.print("ring attention, where cp > 1: torch's kernels block by block", highlight=False)
    for notice in run.notices:
        console.print(notice, soft_wrap=True, markup=False, highlight=False)


def check_gpus(kind: str, needed: int) -> None:
    """Two ranks on one GPU would fail late, deep in the communication library."""
    if kind == "cuda" and torch.cuda.device_count() < needed:
        raise StrategyError(
            f"{needed} ranks on this machine need a GPU each, and it has {torch.cuda.device_count()}; "
            "start the ranks of several machines with torchrun"
        )


def device_of(kind: str, index: int) -> torch.device:
    """The device of a rank, the `index`-th of its machine."""
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
