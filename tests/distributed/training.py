"""The same tiny Llama on one device and under a strategy, and their comparison (DESIGN §8).

T0 is the tiny model of the cases: 43,296 parameters. D0 are 24 sequences of 16 ids. Tolerances are fixed
here, once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hetero_megatron.cluster import Cluster
from hetero_megatron.data.batch import pack, piece_of
from hetero_megatron.data.dispatch import deal
from hetero_megatron.graph.trace import trace
from hetero_megatron.layers.initial import initial_value, initial_values
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import Llama, build_single_device
from hetero_megatron.program import Program
from hetero_megatron.runtime.batch import IGNORE, MicroBatch
from hetero_megatron.runtime.binding import Kernels
from hetero_megatron.runtime.checkpoint_read import SavedState
from hetero_megatron.runtime.learning_rate import learning_rate
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session, StepResult
from hetero_megatron.runtime.state import BUCKET_ELEMENTS, ParameterSlot, view
from hetero_megatron.runtime.world import World
from hetero_megatron.strategy import Pipeline, Stage, Strategy
from tests.distributed.ranks import run_ranks

T0 = LlamaConfig(
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=96,
)
LOSS_RTOL, RTOL, ATOL = 1e-5, 1e-4, 1e-6
ADAM = OptimizerSettings(lr=1e-2, eps=1e-4, train_iters=100)

Document = tuple[int, ...]
StepData = tuple[Document, ...]


def sequences(count: int, length: int = 16, vocab: int = 96, seed: int = 0) -> tuple[Document, ...]:
    """D0-like documents: ids 3..vocab-1."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        tuple(torch.randint(3, vocab, (length,), generator=generator).tolist()) for _ in range(count)
    )


def stage(ranks: str, layers: str | None, tp: int | tuple[int, ...] = 0, cp: int = 1) -> Stage:
    """`stage("0-1", "0-2")`; several chunks as `stage("0", "0-1, 4")`."""

    def span(text: str) -> range:
        first, _, last = text.partition("-")
        return range(int(first), int(last or first) + 1)

    numbers = [span(part) for part in layers.split(",")] if layers else []
    ranges = tuple((each[0], each[-1]) for each in numbers)
    return Stage(tuple(span(ranks)), ranges[0] if len(ranges) == 1 else ranges or None, tp, cp)


def strategy(*pipelines: tuple[int, int, Sequence[Stage]], **options: Any) -> Strategy:
    """Pipelines as (micro_batches, micro_batch_size, stages)."""
    return Strategy(
        tuple(Pipeline(count, size, tuple(stages)) for count, size, stages in pipelines), **options
    )


def het3(count: int = 3, size: int = 2) -> Strategy:
    """P0: R0-1/TP2/L0-2 > R2/TP1/L3."""
    return strategy((count, size, [stage("0-1", "0-2"), stage("2", "3")]))


def het4(first: tuple[int, int] = (3, 1), second: tuple[int, int] = (1, 1), **options: Any) -> Strategy:
    """HET3 plus P1: R3/TP1/L0-3."""
    return strategy(
        (*first, [stage("0-1", "0-2"), stage("2", "3")]), (*second, [stage("3", "0-3")]), **options
    )


@dataclass
class Outcome:
    """Losses and norms per step; full tensors after the last: `parameter`, `gradient`, `exp_avg`..."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    shards: dict[int, dict[str, dict[str, Tensor]]] = field(default_factory=dict)
    extra: dict[int, Any] = field(default_factory=dict)


def micro_batch(
    documents: Sequence[Document], multiple: int = 1, masks: Mapping[Document, Sequence[int]] | None = None
) -> MicroBatch:
    """Documents packed; `masks` lists target positions to ignore, by document."""
    batch = pack([piece_of(document) for document in documents], multiple)
    if masks:
        at = 0
        for document in documents:
            for position in masks.get(document, ()):
                batch.targets_T[at + position] = IGNORE
            at += len(document)
    return batch


def build(model: Llama, plan: Strategy) -> Program:
    """The Program of a strategy on as many CPU ranks as it names."""
    cluster = Cluster.local_cpu(max((*plan.ranks, *plan.idle_ranks)) + 1)
    return Program.build(trace(model), plan, model.config.facts, cluster)


def start(
    model: Llama,
    program: Program,
    world: World,
    settings: OptimizerSettings,
    dtype: torch.dtype,
    seed: int,
    kernels: Kernels | None = None,
    bucket_elements: int = BUCKET_ELEMENTS,
    saved: SavedState | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> Session:
    """A Session that starts as `build_single_device(config, seed)`, from a saved state, or from the full `weights`."""
    specs = initial_values(model)

    def initial(slot: ParameterSlot) -> Tensor:
        if weights is not None:
            return weights[slot.name][tuple(slice(lo, hi) for lo, hi in slot.bounds)]
        return initial_value(slot.name, specs[slot.name], slot.bounds, slot.full_shape, seed)

    modules = dict(model.named_modules())
    first = saved.initial if saved else initial
    session = Session(program, world, modules, first, settings, dtype, kernels, bucket_elements)
    if saved:
        saved.restore(session)
    return session


def alter_gradients(session: Session, change: Callable[[ParameterSlot, Tensor, float], None]) -> None:
    """Let `change(slot, gradient, divisor)` overwrite the synchronised gradients (sums) before the norm."""
    collect = session.gradient_hook

    def hook(slot: ParameterSlot, gradient: Tensor, divisor: float) -> None:
        change(slot, gradient, divisor)
        if collect:
            collect(slot, gradient, divisor)

    session.gradient_hook = hook


def zero_head(session: Session) -> None:
    """All logits 0, on every rank that holds a part of the head: the loss is then ln(vocabulary)."""
    for slot in session.state.slots:
        if slot.name == "head.weight":
            view(session.state.master, slot).zero_()
    session.gather.start()


def snapshot(session: Session) -> list[Tensor]:
    """Copies of all that an update changes on this rank: master weights, moments, step count."""
    state = session.state
    return [state.master.clone(), *(m.clone() for m in state.moments.values()), torch.tensor(state.step)]


def train(
    plan: Strategy,
    steps: Sequence[StepData],
    config: LlamaConfig = T0,
    settings: OptimizerSettings = ADAM,
    dtype: torch.dtype = torch.float32,
    seed: int = 7,
    masks: Mapping[Document, Sequence[int]] | None = None,
    prepare: Callable[[Session], None] | None = None,
    before_step: Callable[[Session, int], None] | None = None,
    batches_of: Callable[[Session, int, list[MicroBatch]], list[MicroBatch]] | None = None,
    collect: Callable[[Session], Any] | None = None,
    timeout_s: float = 60.0,
    kernels: Kernels | None = None,
    bucket_elements: int = BUCKET_ELEMENTS,
    saved: SavedState | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> Outcome:
    """Train on real processes, from a saved state if given; rows of a step are dealt over the pipelines in order."""
    model = Llama(config)
    program = build(model, plan)

    def work(world: World) -> Any:
        session = start(
            model, program, world, settings, dtype, seed, kernels, bucket_elements, saved, weights
        )
        gradients: dict[str, Tensor] = {}
        session.gradient_hook = lambda slot, gradient, divisor: gradients.update(
            {slot.name: gradient / max(divisor, 1.0)}
        )
        if prepare:
            prepare(session)
        number, _ = program.pipeline_of(world.rank)
        results = []
        for step, documents in enumerate(steps):
            dealt = deal(len(documents), [(p.micro_batches, p.micro_batch_size) for p in plan.pipelines])[
                number
            ]
            batches = [
                micro_batch([documents[row] for row in rows], program.token_multiple(number), masks)
                for rows in dealt
            ]
            if batches_of:
                batches = batches_of(session, step, batches)
            if before_step:
                before_step(session, step)
            results.append(session.step(batches))
        shards = session.shards()
        for name, gradient in gradients.items():
            shards[name]["gradient"] = gradient
        return results, shards, collect(session) if collect else None

    found = run_ranks(plan.ranks, work, timeout_s)
    outcome = Outcome(shards={rank: shards for rank, (_, shards, _) in found.items()})
    for results in zip(*(results for results, _, _ in found.values()), strict=True):
        reported = {repr((r.loss, r.grad_norm, r.valid_tokens, r.skipped)) for r in results}
        assert len(reported) == 1, f"ranks report different things of one step: {reported}"
        outcome.results.append(results[0])
        outcome.losses.append(results[0].loss)
        outcome.norms.append(results[0].grad_norm)
    outcome.tensors = assemble(program, outcome.shards)
    outcome.extra = {rank: extra for rank, (_, _, extra) in found.items()}
    return outcome


def assemble(
    program: Program,
    shards: Mapping[int, Mapping[str, Mapping[str, Tensor]]],
    kinds: Sequence[str] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Full tensors from the shards of all ranks; every copy must be bit-equal to the first."""
    full: dict[str, dict[str, Tensor]] = {}
    graph = program.annotated.graph
    for name in graph.parameters:
        shape = graph.parameter_shape(name)
        for kind in kinds or next(iter(shards[program.plan[name].ranks[0]].values())):
            annotation = program.plan[name] if kind == "parameter" else program.annotated.states[name]
            tensor = torch.full(shape, float("nan"))
            seen = torch.zeros(shape, dtype=torch.bool)
            for rank in annotation.ranks:
                part = tuple(slice(lo, hi) for lo, hi in annotation.region(rank).bounds(shape))
                shard = shards[rank][name][kind].float()
                known = seen[part]
                assert torch.equal(tensor[part][known], shard[known]), (
                    f"{kind} of {name}: rank {rank} holds another copy"
                )
                tensor[part] = shard
                seen[part] = True
            assert seen.all(), f"{kind} of {name}: some element is on no rank"
            full.setdefault(name, {})[kind] = tensor
    return full


def reference(
    steps: Sequence[StepData],
    config: LlamaConfig = T0,
    settings: OptimizerSettings = ADAM,
    dtype: torch.dtype = torch.float32,
    seed: int = 7,
    masks: Mapping[Document, Sequence[int]] | None = None,
    prepare: Callable[[torch.nn.Module], None] | None = None,
    packed: bool = True,
    weights: Mapping[str, Tensor] | None = None,
) -> Outcome:
    """REF: one process, plain autograd and torch.optim, the whole step as one batch (or each row by itself)."""
    torch.set_num_threads(1)
    model = build_single_device(config, seed)
    if weights is not None:
        model.load_state_dict(dict(weights))
    if prepare:
        prepare(model)
    parameters = dict(model.named_parameters())
    kind = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}[settings.name]
    options: dict[str, Any] = (
        {"betas": (settings.beta1, settings.beta2), "eps": settings.eps} if settings.name == "adam" else {}
    )
    groups = [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = kind(groups, lr=settings.lr, **options)
    outcome = Outcome()
    for step, documents in enumerate(steps):
        optimizer.zero_grad()
        rows = [documents] if packed else [(document,) for document in documents]
        batches = [micro_batch(row, masks=masks) for row in rows]
        losses = torch.stack([model(b.tokens_T, b.targets_T, b.segments) for b in batches])
        loss = losses.sum() / sum(b.valid_tokens for b in batches)
        loss.backward()
        gradients = {name: p.grad.detach().clone() for name, p in parameters.items()}
        norm = torch.cat([g.flatten() for g in gradients.values()]).double().norm().item()
        if settings.clip_grad:
            for p in parameters.values():
                p.grad.mul_(min(1.0, settings.clip_grad / (norm + 1e-6)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step + 1)
        optimizer.step()
        outcome.losses.append(loss.item())
        outcome.norms.append(norm)
        outcome.tensors = {
            name: {"parameter": p.detach().clone(), "gradient": gradients[name]}
            for name, p in parameters.items()
        }
    return outcome


def without_step(found: Outcome, step: int) -> Outcome:
    """`found` with the losses and norms of `step` (from 0) left out."""
    losses, norms = (
        [v for at, v in enumerate(values) if at != step] for values in (found.losses, found.norms)
    )
    return replace(found, losses=losses, norms=norms)


def assert_parity(found: Outcome, wanted: Outcome) -> None:
    """PARITY: losses of every step, gradients of the last step, parameters after it."""
    for step, (loss, expected) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        assert abs(loss - expected) <= LOSS_RTOL * abs(expected), (
            f"step {step}: loss {loss}, one device has {expected}"
        )
    for step, (norm, expected) in enumerate(zip(found.norms, wanted.norms, strict=True)):
        assert abs(norm - expected) <= RTOL * expected, (
            f"step {step}: grad norm {norm}, one device has {expected}"
        )
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, tensors in wanted.tensors.items():
        torch.testing.assert_close(
            found.tensors[name]["parameter"],
            tensors["parameter"],
            rtol=RTOL,
            atol=ATOL,
            msg=lambda m, n=name: f"{n}: {m}",
        )
        torch.testing.assert_close(
            found.tensors[name]["gradient"],
            tensors["gradient"],
            rtol=RTOL,
            atol=ATOL,
            msg=lambda m, n=name: f"gradient of {n}: {m}",
        )
