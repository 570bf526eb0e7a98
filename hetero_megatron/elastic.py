"""A run that loses ranks and goes on: `hetero-megatron pretrain --elastic RECIPE`.

A supervisor starts the ranks. When some are lost, the others agree on the last step that counts, take a strategy for
those who are left, move the state, and go on in the same processes with the next sample.
"""

import contextlib
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from rich.console import Console

from hetero_megatron.change_request import ChangeRequests
from hetero_megatron.data.loader import LoadedStep
from hetero_megatron.data.samples import DataPosition
from hetero_megatron.errors import HeteroError, StrategyError
from hetero_megatron.graph.trace import trace
from hetero_megatron.journal import Journal
from hetero_megatron.loop import Memory, Told
from hetero_megatron.losses import guardians, survivable
from hetero_megatron.models.llama import Llama
from hetero_megatron.next_program import NextProgram
from hetero_megatron.program import Program
from hetero_megatron.report import short_strategy, strategy_text
from hetero_megatron.run import DTYPES, Run, settings_of
from hetero_megatron.runtime.agree import agree_on_kernels
from hetero_megatron.runtime.elastic import ElasticSession
from hetero_megatron.runtime.faults import Fault, Faults
from hetero_megatron.runtime.launch import preload
from hetero_megatron.runtime.making import Making
from hetero_megatron.runtime.membership import Member
from hetero_megatron.runtime.session import Evaluation, Session, StepResult
from hetero_megatron.runtime.stopping import StopRequest
from hetero_megatron.runtime.supervisor import Limits, Node, Supervisor
from hetero_megatron.runtime.world import Groups, World, silent
from hetero_megatron.starting import agree_on_start, find_start
from hetero_megatron.tracing import Tracer, continued
from hetero_megatron.train import announce, check_gpus, device_of, initial_of, loop_of, memory_of, saver_of
from hetero_megatron.watch import SkipWatch, SpikeWatch


@dataclass(frozen=True, slots=True)
class Place:
    """Which node this is, where node 0 listens (`host:port`), and how many nodes the run begins with (None: all)."""

    node: int = 0
    endpoint: str | None = None
    present: int | None = None


def pretrain_elastic(run: Run, place: Place | None = None) -> int:
    """Start this node's ranks under a supervisor and train; returns 0 when those that were not lost have succeeded.

    Raises:
        StrategyError: this machine has fewer GPUs than its ranks need, or the nodes do not fit the cluster.
        RuntimeFailure: the endpoint is taken.
    """
    torch.set_num_threads(1)
    strategy, section = run.program.strategy, run.recipe.elastic
    ranks = tuple(sorted(strategy.ranks + strategy.idle_ranks))
    node = _node(run, ranks, place or Place())
    check_gpus(run.device, len(node.ranks))
    for fault in section.faults:
        if fault.rank not in ranks:
            raise StrategyError(
                f"elastic.faults: rank {fault.rank} is none of the strategy's ranks {list(ranks)}"
            )
    following = NextProgram(run.recipe, run.config, trace(run.model))
    if node.first_ranks != ranks:
        first, _ = following.strategy(None, node.first_ranks)
        run = run.under(following.program(first, node.first_ranks))
    preload(any(stage.recompute for pipeline in strategy.pipelines for stage in pipeline.stages))
    if not node.number:
        announce(run)
        kept = guardians(run.program) if section.copies else {}
        text = str(survivable(run.program, kept))
        Console().print(text, soft_wrap=True, markup=False, highlight=False)
    request = StopRequest()

    def main(member: Member) -> None:
        try:
            with run.recipe.named():
                _Rank(run, member, node, request, following).work()
        except HeteroError as error:
            member.refuse(str(error))
            raise

    limits = Limits(section.heartbeat_s, section.phase_s, section.timeout_s)
    with request.listening():
        return Supervisor(node, main, limits, request, section.returning).run()


def _node(run: Run, ranks: tuple[int, ...], place: Place) -> Node:
    """This node among those of the cluster; without an endpoint all ranks are on this machine."""
    if place.endpoint is None:
        if place.node or place.present is not None:
            raise StrategyError("several nodes need --endpoint HOST:PORT, the address of node 0")
        return Node(ranks)
    host, _, port = place.endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise StrategyError(f"--endpoint {place.endpoint!r} is no HOST:PORT, such as node0:29500")
    cluster = run.program.cluster
    nodes: dict[int, tuple[int, ...]] = {}
    for rank in ranks:
        nodes[cluster.node_of(rank)] = (*nodes.get(cluster.node_of(rank), ()), rank)
    present = len(nodes) if place.present is None else place.present
    if place.node not in nodes or not 1 <= present <= len(nodes):
        raise StrategyError(
            f"--node-rank {place.node} and --nodes-present {present}: the strategy has ranks on {len(nodes)} nodes, "
            f"numbered {min(nodes)} to {max(nodes)}"
        )
    return Node(nodes[place.node], place.node, nodes, host, int(port), present)


class _Rank:
    """The life of one rank, over all generations."""

    def __init__(
        self, run: Run, member: Member, node: Node, request: StopRequest, following: NextProgram
    ) -> None:
        self._run, self._member, self._request, self._following = run, member, request, following
        self._is_local = node.nodes is None
        self._device = device_of(run.device, node.ranks.index(member.rank))
        self._memory = memory_of(run)
        self._told = 0
        self._tracer: Tracer | None = None

    def work(self) -> None:
        """Train until the end."""
        run, training, section = self._run, self._run.recipe.training, self._run.recipe.elastic
        making = Making(
            lambda: dict(Llama(run.config).named_modules()),
            run.settings,
            DTYPES[training.precision],
            run.kernels.load(),
            training.bucket_size,
            self._device,
            section.timeout_s,
            self._is_local,
            section.copies,
        )
        self._making = making
        faults = [Fault(**fault.model_dump()) for fault in section.faults]
        self._requests = ChangeRequests(self._member)
        elastic = ElasticSession(
            self._member,
            run.program,
            making,
            self._first,
            self._following,
            self._from_checkpoint,
            Faults(faults) if faults else None,
            self._requests.strategy,
        )
        elastic.run(lambda session: self._train(elastic, session))
        elastic.leave()

    def _first(self, program: Program, world: World, groups: Groups) -> Session | None:
        """The session that the run begins with."""
        self._run = self._run.agreed(world)
        self._memory = memory_of(self._run)
        return self._started(program, world, groups)

    def _started(self, program: Program, world: World, groups: Groups) -> Session | None:
        if world.rank not in program.strategy.ranks:
            return None
        run = self._run
        session = self._making.session(program, world, groups)
        agree_on_kernels(session.world, run.kernels.names)
        session.start(initial_of(run, self._device))
        if run.start.saved is not None:
            run.start.saved.restore(session, say=silent)
        return session

    def _from_checkpoint(self, program: Program, world: World, groups: Groups) -> Session | None:
        """Collective: go back to the newest checkpoint, or to the beginning where there is none."""
        run = self._run
        recipe = run.recipe.model_copy(
            update={"checkpoint": run.recipe.checkpoint.model_copy(update={"resume": "auto"})}
        )
        settings = settings_of(recipe, run.data)
        found = find_start(recipe, program, settings, run.identity, silent)
        start = agree_on_start(world, found, recipe, program, settings, run.identity)
        self._run = replace(run, start=start, settings=start.settings)
        self._memory = memory_of(self._run)
        return self._started(program, world, groups)

    def _train(self, elastic: ElasticSession, session: Session) -> None:
        """From where the session stands to the end of the run, or until others are lost."""
        run = self._run.under(session.program)
        memory = self._memory
        self._catch_up(elastic, session)
        unfinished = memory.result is not None and memory.finished < memory.result.iteration
        shown = replace(run, start=replace(run.start, iteration=session.iteration - unfinished))
        with contextlib.ExitStack() as stack:
            # A process that has started CUDA cannot be forked any more.
            workers = 0 if run.device == "cuda" else None
            position = self._position(session.iteration)
            loader = stack.enter_context(run.loader(session.world.rank, position, workers))
            journal = stack.enter_context(Journal.kept(shown, session))
            for recovery in elastic.recoveries[self._told :]:
                journal.say(f"{recovery}; {short_strategy(run.program.strategy)}")
            if elastic.recoveries[self._told :]:
                journal.say(strategy_text(run.program.strategy))
            self._told = len(elastic.recoveries)
            saver = saver_of(run, session, journal, forsaken=bool(elastic.recoveries))
            if run.recipe.elastic.faults:
                saver.amid = partial(elastic.strike, "saving")
            stack.callback(saver.abandon)
            loop = loop_of(run, session, loader, saver, self._request, memory, journal)
            loop.told = self._telling(elastic, journal)
            loop.tracer = self._tracer = continued(self._tracer, loop.tracer)
            loop.newcomers, loop.make_way = self._member.is_awaited, elastic.stop_for_joining
            if loop.watch is not None:
                loop.newcomers = self._requests.attend(loop.watch)
            journal.end(loop.run())

    def _telling(self, elastic: ElasticSession, journal: Journal) -> Told:
        """What the journal says of a step, and of the recovery before it, which ends with it."""
        last = elastic.recoveries[-1] if elastic.recoveries else None
        untold = [] if last is None or "redo" in last.seconds else [last]

        def told(
            result: StepResult,
            loaded: LoadedStep,
            measured: Evaluation | None,
            note: str | None,
            consumed_tokens: int,
        ) -> None:
            journal.step(result, loaded, measured, note, consumed_tokens)
            if untold and "redo" in untold[0].seconds:
                journal.say(untold.pop().end)

        return told

    def _catch_up(self, elastic: ElasticSession, session: Session) -> None:
        """Collective: ranks leave a step at different places behind its agreement; all learn what the furthest knows."""
        if not elastic.recoveries:
            return
        memory, world = self._memory, session.world
        done = elastic.completed
        if done and memory.opened and done.iteration == memory.opened.position.iteration:
            memory.result = memory.result or done
        if memory.result and memory.result.iteration != session.iteration:
            memory.result = None
        kept = replace(memory, spikes=memory.spikes.to_json(), skips=memory.skips.count)  # type: ignore[arg-type]
        told: list[Memory] = [kept] * len(world.ranks)
        if len(world.ranks) > 1:
            dist.all_gather_object(told, kept, group=world.control)
        knowing = [each for each in told if each.result is not None]
        if not any(each.counted or each.result for each in told):
            return
        first = max(told, key=lambda each: each.counted)
        memory.spikes = SpikeWatch.from_json(memory.spikes.factor, first.spikes)  # type: ignore[arg-type]
        memory.skips = SkipWatch(self._run.recipe.training.nonfinite_limit, first.skips)  # type: ignore[arg-type]
        memory.consumed_tokens, memory.counted = first.consumed_tokens, first.counted
        memory.note, memory.refusal = first.note, first.refusal
        if knowing:
            memory.result, memory.opened = knowing[0].result, knowing[0].opened
            memory.finished = min(each.finished for each in knowing)
        else:
            memory.result, memory.finished = None, session.iteration

    def _position(self, iteration: int) -> DataPosition:
        """Where the data stands after `iteration` steps."""
        steps, position = self._run.data.steps, self._run.start.position
        while position.iteration < iteration and (step := steps.at(position)) is not None:
            position = steps.after(step)
        return position
