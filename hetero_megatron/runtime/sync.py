"""Between the layout of parameters and that of optimizer states: Post and Pre, one Exchange per bucket (paper §5.2, A.2).

Both overlap with computation: a bucket of gradients is on its way while the backward pass of its last micro-batch
goes on, and a bucket of parameters arrives behind the first forward pass.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hetero_megatron.comm.steps import CommPlan
from hetero_megatron.runtime.clock import Clock
from hetero_megatron.runtime.exchange import Exchange
from hetero_megatron.runtime.state import Bucket, Slots, State, span, view
from hetero_megatron.runtime.world import Groups, World


@dataclass(frozen=True, slots=True)
class _Route:
    """One bucket in one direction: from views of one flat buffer to views of another, or of the same one."""

    exchange: Exchange | None
    source: Tensor
    sources: list[Tensor]
    target: Tensor
    targets: list[Tensor]

    def start(self, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
        """Exchange in `dtype` on `device`; when the returned function has run, the result is in the target."""
        # A rank without a part of the target may have a source: it helps others, or stays as it is.
        if self.exchange is None:
            if self.target.numel():
                self.target.copy_(self.source)
            return _nothing
        flat, sources = self.source, self.sources
        if (flat.dtype, flat.device.type) != (dtype, device.type):
            flat = flat.to(device, dtype)
            parts = zip(flat.split([view.numel() for view in sources]), sources, strict=True)
            sources = [part.view(view.shape) for part, view in parts]
        exchanged = self.exchange.start(sources, flat)

        def finish() -> None:
            for made, target in zip(exchanged(), self.targets, strict=True):
                if made is not target and target.numel():
                    target.copy_(made)

        return finish


def _nothing() -> None:
    """There is nothing to wait for."""


def _route(
    plan: CommPlan, rank: int, groups: Groups, sides: tuple[tuple[Tensor, Slots], tuple[Tensor, Slots]]
) -> _Route:
    (source, before), (target, after) = sides
    exchange = Exchange(plan, rank, groups, [slot.full_shape for slot in before]) if plan.stages else None
    sources = [view(source, slot) for slot in before]
    return _Route(
        exchange,
        source[span(before)],
        sources,
        target[span(after)],
        # What is summed in place is already where it belongs.
        sources if source is target else [view(target, slot) for slot in after],
    )


class GradientSync:
    """Post: from the gradient that each rank computed to the layout of the optimizer states.

    Buckets start in the reverse of their forward order, which is the same order on all ranks, each as soon as its
    gradients and those of the buckets before it are complete.
    """

    def __init__(self, state: State, world: World, groups: Groups, uses: Mapping[str, int]) -> None:
        """`uses`: in how many chunks of this rank each parameter is used; each of them adds to its gradient."""
        self._state, self._device = state, world.device
        self._uses = dict(uses)
        buckets = [bucket for bucket in reversed(state.buckets) if bucket.post.stages or state.is_apart]
        self._routes = [self._route(bucket, world, groups) for bucket in buckets]
        self._names = [[slot.name for slot in bucket.parameters] for bucket in buckets]
        self._place = {name: place for place, names in enumerate(self._names) for name in names}
        self._missing: list[int] = []
        self._started: list[Callable[[], None]] = []

    def _route(self, bucket: Bucket, world: World, groups: Groups) -> _Route:
        state = self._state
        sides = ((state.accumulated, bucket.parameters), (state.gradient, bucket.states))
        return _route(bucket.post, world.rank, groups, sides)

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to exchange."""
        return bool(self._routes)

    def begin(self) -> None:
        """Forget the last step."""
        self._missing = [sum(self._uses.get(name, 0) for name in names) for names in self._names]
        self._started = []

    @contextmanager
    def last_backward(self, names: Sequence[str]) -> Iterator[None]:
        """Around the last backward pass of a chunk with these parameters: buckets start as they become complete."""
        hooks = [
            self._state.parameters[name].register_post_accumulate_grad_hook(self._note(place))
            for name in names
            if (place := self._place.get(name)) is not None
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, place: int) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            del parameter
            self._missing[place] -= 1
            while len(self._started) < len(self._routes) and not self._missing[len(self._started)]:
                self._start()

        return note

    def _start(self) -> None:
        self._started.append(self._routes[len(self._started)].start(torch.float32, self._device))

    def finish(self) -> None:
        """Start what has not been started, in plan order, and wait for all."""
        while len(self._started) < len(self._routes):
            self._start()
        for finish in self._started:
            finish()
        self._started = []


class ParameterGather:
    """Pre: from the master weights to the parameters, rounded to their dtype before they travel."""

    def __init__(
        self,
        state: State,
        world: World,
        groups: Groups,
        users: Mapping[str, nn.Module],
        clock: Clock | None = None,
    ) -> None:
        """`users`: the first module of a forward pass that uses each parameter; `clock` is told when a trace is made."""
        self._dtype, self._device, self._clock = state.compute.dtype, world.device, clock or Clock()
        buckets = [] if state.compute is state.master else state.buckets
        # Autograd counts writes to a buffer, not to its parts: a bucket that arrives behind the forward pass would
        # look like a change of the weights that the pass has used. `data` is the same memory without that count.
        compute = state.compute.data
        sides = [((state.master, b.states), (compute, b.parameters)) for b in buckets]
        self._routes = [
            _route(bucket.pre, world.rank, groups, side) for bucket, side in zip(buckets, sides, strict=True)
        ]
        order = {id(module): place for place, module in enumerate(users.values())}
        self._first = [
            min(
                (users[slot.name] for slot in b.parameters if slot.name in users),
                key=lambda m: order[id(m)],
                default=None,
            )
            for b in buckets
        ]
        self._arriving: dict[int, tuple[Callable[[], None], RemovableHandle]] = {}

    def start(self) -> None:
        """Begin to make all parameters from the master weights, in plan order on every rank.

        What is one collective is waited for where the first forward pass uses it. A longer exchange is finished
        here: to wait for other ranks inside a forward pass could close a circle with the pipeline's messages.
        """
        self.finish()
        mark = self._clock.mark() if self._routes else None
        for place, route in enumerate(self._routes):
            finish, first = route.start(self._dtype, self._device), self._first[place]
            if first is None or route.exchange is None or not route.exchange.is_one_collective:
                finish()
            else:
                hook = first.register_forward_pre_hook(lambda *_, place=place: self._arrive(place))
                self._arriving[place] = finish, hook
        self._clock.span("gather", "parameters", mark)

    def finish(self) -> None:
        """Wait for all that has not been used yet."""
        for place in list(self._arriving):
            self._arrive(place)

    def _arrive(self, place: int) -> None:
        finish, hook = self._arriving.pop(place)
        hook.remove()
        mark = self._clock.mark()
        finish()
        self._clock.span("gather", "parameters", mark)
