"""One rank's part of a Program made executable: shards, bound layers, generated code, stage boundaries (paper §6.2)."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetero_megatron.graph.nodes import Kind, Node
from hetero_megatron.graph.specialize import Chunk, ExecutableGraph
from hetero_megatron.pipeline.action import Action, Batch, receive_for
from hetero_megatron.program import Program, split_groups
from hetero_megatron.recompute import recomputed_runs
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.binding import Bindable, Binding, Exchanging, Kernels
from hetero_megatron.runtime.boundary import Boundary
from hetero_megatron.runtime.clock import Clock
from hetero_megatron.runtime.context import ContextLayout
from hetero_megatron.runtime.context_group import ContextGroup, WorldChannel, columns_of, looks_across_tokens
from hetero_megatron.runtime.deferred import Deferred
from hetero_megatron.runtime.exchange import all_reduce
from hetero_megatron.runtime.offload import Offload
from hetero_megatron.runtime.recompute import generate_recomputed
from hetero_megatron.runtime.recorder import Moment
from hetero_megatron.runtime.slices import Shape
from hetero_megatron.runtime.stage import EdgeReduce, Reshards, StageRun
from hetero_megatron.runtime.state import BUCKET_ELEMENTS, ParameterSlot, Placement, State, lay_out
from hetero_megatron.runtime.world import Groups, World


@dataclass
class _Port:
    """A boundary Reshard on this rank: its two directions, and what is waiting to be sent or used.

    `number` is its place among all Reshards, the same on both ends. `arriving` are receives that were posted, by
    micro-batch; `ready` is what they brought, or what was computed and not sent yet.
    """

    name: str
    number: int
    width: int
    hsize: int
    forward: Boundary | None
    backward: Boundary | None
    arriving: dict[int, tuple[Sequence[dist.Work], Callable[[], Tensor]]] = field(default_factory=dict)
    ready: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sharing:
    """What the programs of a run have in common that share optimizer states.

    Attributes:
        programs: all of them; buckets are cut so that they are buckets in each, and lie in one order.
        state: the State that was made first and has the buffers.
    """

    programs: tuple[Program, ...] = ()
    state: State | None = None

    def kin(self, name: str) -> tuple[int, ...]:
        """Equal for parameters that have the same plans in every program."""
        return tuple(id(plans[name]) for each in self.programs for plans in (each.posts, each.pres))


def placements(
    program: Program, executable: ExecutableGraph, sharing: Sharing | None = None
) -> list[Placement]:
    """The parameters of a rank with the layouts and plans of their gradients and states."""
    graph, states = program.annotated.graph, program.annotated.states
    return [
        Placement(
            post.name,
            graph.parameter_shape(post.name),
            program.plan[post.name],
            states[post.name],
            program.posts[post.name],
            program.pres[post.name],
            (sharing or Sharing()).kin(post.name),
        )
        for post in executable.post
    ]


class BoundStage:
    """Executes the actions of this rank's stage."""

    def __init__(
        self,
        program: Program,
        world: World,
        groups: Groups,
        modules: Mapping[str, nn.Module],
        dtype: torch.dtype,
        clock: Clock,
        kernels: Kernels,
        bucket_elements: int = BUCKET_ELEMENTS,
        sharing: Sharing | None = None,
    ) -> None:
        self.world, self.clock, self.dtype = world, clock, dtype
        self._kernels = kernels
        self._program, self._groups = program, groups
        self._deferred = Deferred()
        executable = program.executable(world.rank)
        self.constraints = executable.constraints
        self._layout = self._context_layout()
        self.state = self._cut_parameters(executable, modules, bucket_elements, sharing or Sharing())
        edges = self._bind_layers(executable, modules)
        self._offload = Offload(world.device)
        self._runs = [self._run(chunk, modules, edges) for chunk in executable.chunks]
        self._inputs = [self._ports(executable, chunk.inputs) for chunk in executable.chunks]
        self._outputs = [self._ports(executable, chunk.outputs) for chunk in executable.chunks]
        self._parameters = [
            tuple(
                dict.fromkeys(
                    name for node in chunk.nodes for name in node.inputs if name in self.state.parameters
                )
            )
            for chunk in executable.chunks
        ]
        # The first module of a forward pass that uses each parameter, in forward order.
        self.first_users: dict[str, nn.Module] = {}
        for node in (node for chunk in executable.chunks for node in chunk.nodes if node.module):
            for name in node.inputs:
                if name in self.state.parameters:
                    self.first_users.setdefault(name, modules[node.module])
        number, _ = program.pipeline_of(world.rank)
        # A fault on purpose: every pass takes so many times as long.
        self.slowness = 1.0
        self._most_sending = 2 * len(program.pipelines[number]) * len(executable.chunks)
        self._sending: deque[list[dist.Work]] = deque()

    @property
    def uses(self) -> Mapping[str, int]:
        """In how many chunks each parameter is used."""
        return Counter(name for names in self._parameters for name in names)

    def parameters_of(self, chunk: int) -> tuple[str, ...]:
        """The parameters that a chunk uses."""
        return self._parameters[chunk]

    def _cut_parameters(
        self,
        executable: ExecutableGraph,
        modules: Mapping[str, nn.Module],
        bucket_elements: int,
        sharing: Sharing,
    ) -> State:
        program = self._program
        buckets = lay_out(self.world.rank, placements(program, executable, sharing), bucket_elements)
        offload = program.strategy.offload_optimizer
        state = State(buckets, self.dtype, self.world.device, offload, held=False, shared=sharing.state)
        state.attach(modules)
        return state

    def _bind_layers(
        self, executable: ExecutableGraph, modules: Mapping[str, nn.Module]
    ) -> dict[tuple[str, int], nn.Module]:
        """Put communication into the Reshards, shards and places into the layers; returns what stands on reduced edges.

        A tied parameter is one shard in every layer that uses it, whichever layer it is named after.
        """
        plans = {reshard.name: reshard for reshard in executable.reshards}
        reshards = Reshards(self.world.rank, self._groups, self.clock, self._deferred)
        slots = {slot.name: slot for slot in self.state.parameter_slots}
        for node in (node for chunk in executable.chunks for node in chunk.nodes if node.module):
            module = modules[node.module]
            if node.kind is Kind.RESHARD:
                bound = plans[node.name]
                cast(Exchanging, module).exchange = reshards.bind(bound.forward, bound.backward)
            else:
                names = (name for name, _ in module.named_parameters(recurse=False))
                leaves = (slots[name] for name in node.inputs if name in slots)
                own = dict(zip(names, leaves, strict=True))
                for name, slot in own.items():
                    setattr(module, name, self.state.parameters[slot.name])
                cast(Bindable, module).bind(self._binding(node, own))
        edges: dict[tuple[str, int], nn.Module] = {}
        for edge in executable.edges:
            if (exchange := reshards.bind(None, edge.backward)) is not None:
                edges[edge.consumer, edge.operand] = EdgeReduce(exchange)
        return edges

    def _binding(self, node: Node, parameters: Mapping[str, ParameterSlot]) -> Binding:
        bounds = {name: slot.bounds for name, slot in parameters.items()}
        shapes = {name: slot.full_shape for name, slot in parameters.items()}
        reductions = {}
        if node.signature is not None and node.signature.reduced:
            (factor,) = node.signature.reduced
            annotation = self._program.annotated.values[node.inputs[0]]
            width = self._program.annotated.graph.size(node.inputs[0], 1)
            tokens = annotation.hsize * len(annotation.ranks)  # any count: only the width is read
            shapes["logits"] = (tokens, width)
            bounds["logits"] = annotation.region(self.world.rank).bounds(shapes["logits"])
            ranks = next((group for group in split_groups(annotation, 1) if self.world.rank in group), ())
            if ranks:
                reductions[factor] = _reducer(self._groups[ranks], self.clock)
        # Without tensor parallelism there is nothing to wait for, and what is used at once is still in the cache.
        waits = self._program.stage(self.world.rank).tensor_parallel_size > 1
        later = self._deferred.add if waits else None
        return Binding(node.name, bounds, shapes, reductions, self._kernels, self._context(node), later)

    def _context(self, node: Node) -> ContextGroup | None:
        """For a layer whose tokens look at one another; its second operand is what other parts send."""
        program, rank = self._program, self.world.rank
        parts = program.stage(rank).parts
        if len(parts) == 1 or not looks_across_tokens(node):
            return None
        columns = [columns_of(program, node.inputs[1], part) for part in parts]
        lane = program.lane_of(rank)
        channel = WorldChannel(self.world, self.clock, lane, self._groups[lane] if lane else None)
        return ContextGroup.of(program.strategy.context_parallel, rank, columns, channel)

    def _run(
        self, chunk: Chunk, modules: Mapping[str, nn.Module], edges: Mapping[tuple[str, int], nn.Module]
    ) -> StageRun:
        graph = self._program.annotated.graph
        sources = tuple(graph.node(name).inputs[0] for name in chunk.outputs)
        stage = self._program.stage(self.world.rank)
        runs = recomputed_runs(chunk.nodes, stage.recompute_of)
        module, inputs = generate_recomputed(chunk.nodes, chunk.inputs, sources, modules, edges, runs)
        offload = self._offload if stage.offload else None
        return StageRun(module, inputs, not chunk.outputs, offload, self._deferred)

    def _ports(self, executable: ExecutableGraph, names: Sequence[str]) -> list[_Port]:
        reshards = {reshard.name: reshard for reshard in executable.reshards}
        graph = self._program.annotated.graph
        numbers = {reshard.name: number for number, reshard in enumerate(self._program.reshards)}
        ports = []
        for name in names:
            reshard = reshards[name]
            ports.append(
                _Port(
                    name,
                    numbers[name],
                    graph.size(name, 1),
                    self._program.plan[name].hsize,
                    Boundary(name, reshard.forward, self.world) if reshard.forward else None,
                    Boundary(f"{name} (gradient)", reshard.backward, self.world)
                    if reshard.backward
                    else None,
                )
            )
        return ports

    def _context_layout(self) -> ContextLayout | None:
        program, rank = self._program, self.world.rank
        number, _ = program.pipeline_of(rank)
        shares = program.strategy.pipelines[number].token_shares
        if len(shares) == 1:
            return None
        multiples = tuple(program.token_multiple(number, part) for part in range(len(shares)))
        return ContextLayout(program.part_of(rank), shares, multiples)

    def own_tokens(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """What this rank's context-parallel part takes of its pipeline's micro-batches."""
        return batches if self._layout is None else [self._layout.cut(batch) for batch in batches]

    def check_sizes(self, batches: Sequence[MicroBatch]) -> None:
        """Refuse token counts that this rank's Reshards cannot cut into equal parts.

        Raises:
            GraphError: naming the count, the divisor, and the value that is cut.
        """
        for tokens in {batch.segments.tokens for batch in batches}:
            for constraint in self.constraints:
                constraint.check({constraint.symbol: tokens})

    def compute(self, action: Action, batches: Sequence[MicroBatch]) -> Tensor | None:
        """Run F or B of one micro-batch, once its input is here; returns the loss sum after F of the last chunk."""
        number, chunk = action.micro_batch, action.chunk
        run, loss = self._runs[chunk], None
        inputs, outputs = self._inputs[chunk], self._outputs[chunk]
        mark = self.clock.mark()
        taken = [self._take(port, number) for port in (inputs if action.kind == "F" else outputs)]
        if mark is not None and taken:
            self.clock.span("receive", str(receive_for(action)), mark)
            mark = self.clock.mark()
        at = time.perf_counter()
        before = self.clock.seconds["communication"]
        if action.kind == "F":
            received = {port.name: tensor for port, tensor in zip(inputs, taken, strict=True)}
            made = run.forward(number, batches[number], received)
            if run.ends:
                loss = made[0]
            else:
                for port, output in zip(outputs, made, strict=True):
                    port.ready[number] = output
        else:
            for port, gradient in zip(inputs, run.backward(number, taken), strict=True):
                port.ready[number] = gradient
        inside = self.clock.seconds["communication"] - before
        took = time.perf_counter() - at
        if self.slowness > 1:
            # Not busy: other ranks may share the processor, and are not to be slowed down.
            time.sleep((took - inside) * (self.slowness - 1))
            took = time.perf_counter() - at
        self.clock.seconds["compute"] += took - inside
        self.clock.passes += took
        if mark is not None:
            self.clock.span("forward" if action.kind == "F" else "backward", str(action), mark)
        return loss

    def _take(self, port: _Port, micro_batch: int) -> Tensor:
        """What has been received for a micro-batch, waiting for it if need be."""
        at = time.perf_counter()
        work, finish = port.arriving.pop(micro_batch)
        _wait(work)
        tensor = finish()
        self.clock.add("bubble", at)
        return tensor

    def communicate(self, batch: Batch, batches: Sequence[MicroBatch]) -> None:
        """Post a batch together; its sends go on behind the next computations, its receives until they are used."""
        at = time.perf_counter()
        posted: list[tuple[Action, Moment]] = []
        sends: list[dist.P2POp] = []
        receives: list[dist.P2POp] = []
        landing: list[tuple[_Port, int, int, Callable[[], Tensor]]] = []
        for item in batch.items:
            forward = item.kind.endswith("F")
            downstream = item.kind in ("SEND_F", "RECV_B")
            if item.is_send and (mark := self.clock.mark()) is not None:
                posted.append((item, mark))
            for port in (self._outputs if downstream else self._inputs)[item.chunk]:
                boundary = port.forward if forward else port.backward
                assert boundary is not None, f"{port.name} moves between stages in both directions"
                shape: Shape = (batches[item.micro_batch].segments.tokens * port.hsize, port.width)
                tag = self._tag(port, item.micro_batch, forward)
                if item.is_send:
                    sends += boundary.send(port.ready.pop(item.micro_batch), shape, tag)
                else:
                    operations, finish = boundary.receive(shape, tag, self.dtype)
                    receives += operations
                    landing.append((port, item.micro_batch, len(operations), finish))
        work = dist.batch_isend_irecv(sends + receives) if sends or receives else []
        # NCCL joins a batch into one handle: then every receive waits for all of it.
        joined = len(work) < len(sends) + len(receives)
        first = len(sends)
        for port, number, count, finish in landing:
            port.arriving[number] = (work if joined else work[first : first + count], finish)
            first += count
        if sends:
            self._sending.append(work if joined else work[: len(sends)])
        # What was sent a pipeline's depth ago has been answered: to wait for it only frees its buffer.
        while len(self._sending) > self._most_sending:
            _wait(self._sending.popleft())
        self.clock.add("communication", at)
        recorder = self.clock.recorder
        if recorder is not None:
            ends = [*(began for _, began in posted[1:]), recorder.moment()]
            for (item, began), end in zip(posted, ends, strict=False):
                recorder.add("send", str(item), began, end)

    def _tag(self, port: _Port, micro_batch: int, forward: bool) -> int:
        """One number per message of a step: two chunks between the same two ranks can never be mixed up."""
        return 2 * (micro_batch * len(self._program.reshards) + port.number) + (0 if forward else 1)

    def drain(self) -> None:
        """Wait until everything that was sent has left."""
        at = time.perf_counter()
        while self._sending:
            _wait(self._sending.popleft())
        self.clock.add("communication", at)


def _wait(handles: Sequence[dist.Work]) -> None:
    for handle in handles:
        handle.wait()


def _reducer(group: dist.ProcessGroup, clock: Clock) -> Callable[[Tensor, str], Tensor]:
    def reduce(tensor: Tensor, op: str) -> Tensor:
        at = time.perf_counter()
        all_reduce(tensor, group, op)
        clock.add("communication", at)
        return tensor

    return reduce
