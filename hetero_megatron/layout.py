"""From a strategy to an annotation plan and back: Megatron's tensor-parallel roles by module name (paper §4, C.3)."""

from collections.abc import Iterable, Mapping, Sequence

from hetero_megatron.annotation import DUPLICATE, Annotation, AnnotationPlan, DeviceGroup, DistributedStates
from hetero_megatron.errors import StrategyError
from hetero_megatron.graph.annotated import STATE
from hetero_megatron.strategy import ModelFacts, Pipeline, Stage, Strategy

# How tensor parallelism cuts a parameter, by the last part of its module's name. Weights are stored [out, in].
COLUMN, ROW, KV, WHOLE = "column", "row", "kv", "whole"
PARAMETER_ROLES: Mapping[str, str] = {
    "embedding": COLUMN,
    "attention_norm": WHOLE,
    "wq": COLUMN,
    "wk": KV,
    "wv": KV,
    "wo": ROW,
    "mlp_norm": WHOLE,
    "gate": COLUMN,
    "up": COLUMN,
    "down": ROW,
    "final_norm": WHOLE,
    "head": COLUMN,
    "wq_bias": COLUMN,
    "wk_bias": KV,
    "wv_bias": KV,
    "wo_bias": WHOLE,
    "gate_bias": COLUMN,
    "up_bias": COLUMN,
    "down_bias": WHOLE,
}
# Whether a Reshard's result is whole on every tensor-parallel rank, or split by tokens under sequence parallelism.
GATHERED, SEQUENCE = "gathered", "sequence"
RESHARD_ROLES: Mapping[str, str] = {
    "embedding_out": SEQUENCE,
    "entry": SEQUENCE,
    "attention_in": GATHERED,
    "attention_out": SEQUENCE,
    "mlp_in": GATHERED,
    "mlp_out": SEQUENCE,
    "final_entry": SEQUENCE,
    "head_in": GATHERED,
}
# In a model with tied embeddings, the modules that use one parameter.
TIED: Mapping[str, tuple[str, ...]] = {"embedding.weight": ("embedding", "head")}
# The module at which each input enters.
INPUT_MODULES: Mapping[str, str] = {"tokens": "embedding", "targets": "loss"}


def annotate(
    strategy: Strategy,
    facts: ModelFacts,
    parameters: Iterable[str],
    reshards: Iterable[str],
    inputs: Iterable[str],
    states: Mapping[str, Annotation] | None = None,
) -> AnnotationPlan:
    """The annotation plan of `strategy`: one entry for every leaf and every Reshard of the model.

    A tied parameter lives on the stages of all modules that use it: in every pipeline first and last stage.
    `parameters`, `reshards` and `inputs` are node names, such as `layers.3.wq.weight`, `layers.3.mlp_in`, `tokens`.
    `states` says by parameter where optimizer states live, whatever the strategy would choose: strategies that
    take turns in one run may share them, so that a switch moves no state.
    """
    entries: dict[str, Annotation] = {}
    known: dict[tuple[object, ...], Annotation] = {}

    def entry(name: str, modules: Sequence[str], role: str, hdim: int) -> None:
        """Layers of one stage repeat: an annotation is made once per stages and role."""
        stages = tuple(
            stage
            for pipeline in strategy.pipelines
            for stage in dict.fromkeys(_stage_of(module, pipeline) for module in modules)
        )
        key = (role, hdim, *map(id, stages))
        if key not in known:
            known[key] = _union(stages, role, facts, strategy.sequence_parallel, hdim)
        entries[name] = known[key]

    for name in inputs:
        entry(name, (INPUT_MODULES[name],), GATHERED, 0)
    for name in parameters:
        modules = _users(name, facts)
        entry(name, modules, _shared_role(name, modules), DUPLICATE)
        if states is not None:
            if states[name] != entries[name]:
                entries[name + STATE] = states[name]
        elif strategy.zero:
            entries[name + STATE] = optimizer_layout(entries[name], 1 if name.endswith(".bias") else 2)
    for name in reshards:
        entry(name, (name,), _role(name, RESHARD_ROLES, "Reshard"), 0)
    return AnnotationPlan(entries)


def optimizer_layout(parameter: Annotation, dims: int = 2) -> Annotation:
    """Where ZeRO-1 keeps the states of a parameter: cut over the subgroups, on a dim they leave whole (decision 4).

    Rows where nobody cuts rows, because a run of rows is one piece of memory; otherwise columns. A vector, `dims` 1,
    that tensor parallelism cuts has no such dim: every subgroup keeps its states.
    """
    cut = {dim for states in parameter.states for dim in states.split_dims}
    if parameter.hsize == 1 or (dims == 1 and 0 in cut):
        return parameter
    return parameter.replace(parameter.states, 1 if 0 in cut else 0)


def read_plan(plan: AnnotationPlan, counts: Sequence[tuple[int, int, int]], facts: ModelFacts) -> Strategy:
    """The strategy that `annotate` turns into `plan`.

    `counts` holds (micro_batches, micro_batch_size, context-parallel size) of each pipeline: a plan's subgroups are
    context-parallel parts, and only the counts say which of them share a sequence.

    Raises:
        StrategyError: the plan lacks an input, has another number of parts, or is not what `annotate` would
            write for the stages that it describes; the first entry that differs is named.
    """
    for name in INPUT_MODULES:
        if name not in plan:
            raise StrategyError(f"the annotation plan has no entry {name!r}, where pipelines begin and end")
    parts = sum(cp for _, _, cp in counts)
    if plan["tokens"].hsize != parts:
        shared = f" that make {parts} context-parallel parts" if parts > len(counts) else ""
        raise StrategyError(
            f"the annotation plan has {plan['tokens'].hsize} pipelines, micro-batch counts are given for "
            f"{len(counts)}{shared}"
        )
    pipelines, first = [], 0
    for micro_batches, size, cp in counts:
        pipelines.append(Pipeline(micro_batches, size, _stages(plan, first, cp)))
        first += cp
    entries = [name for name in plan if name not in INPUT_MODULES and not name.endswith(STATE)]
    parameters = [name for name in entries if name.rsplit(".", 1)[-1] not in RESHARD_ROLES]
    reshards = [name for name in entries if name.rsplit(".", 1)[-1] in RESHARD_ROLES]
    split = any(states.split_dims for name in reshards for states in plan[name].states)
    zero = int(any(name.endswith(STATE) for name in plan))
    strategy = Strategy(tuple(pipelines), zero, sequence_parallel=split)
    wanted = annotate(strategy, facts, parameters, reshards, INPUT_MODULES)
    for name in plan:
        if plan[name] != wanted[name]:
            raise StrategyError(
                f"the annotation plan's {name} is {plan[name]}; with the stages that its inputs and entries describe "
                f"it would be {wanted[name]}, and other layouts have no strategy yet"
            )
    return strategy


def _stages(plan: AnnotationPlan, first: int, cp: int) -> tuple[Stage, ...]:
    """Runs of layers on the same groups; a stage that comes back holds a further chunk of an interleaved pipeline.

    The inputs show stages that hold no layer.
    """
    layers = sorted({int(name.split(".")[1]) for name in plan if name.startswith("layers.")})
    walk = [("tokens", None), *((f"layers.{layer}.entry", layer) for layer in layers), ("targets", None)]
    stages: dict[tuple[DeviceGroup, ...], list[list[int]]] = {}
    before: tuple[DeviceGroup, ...] | None = None
    for name, layer in walk:
        if name not in plan or plan[name].hsize < first + cp:
            raise StrategyError(f"the annotation plan has no entry {name!r} for pipeline {first}")
        groups = plan[name].groups[first : first + cp]
        chunks = stages.setdefault(groups, [])
        if layer is not None and (groups != before or not chunks):
            chunks.append([])
        if layer is not None:
            chunks[-1].append(layer)
        before = groups
    return tuple(_stage(groups, chunks) for groups, chunks in stages.items())


def _stage(groups: tuple[DeviceGroup, ...], chunks: Sequence[Sequence[int]]) -> Stage:
    ranges = tuple((own[0], own[-1]) for own in chunks)
    sizes = tuple(len(group) for group in groups)
    ranks = tuple(rank for group in groups for rank in group.ranks)
    layers = None if not ranges else ranges[0] if len(ranges) == 1 else ranges
    return Stage(ranks, layers, 0 if len(set(sizes)) == 1 else sizes, len(groups))


def _role(module: str, roles: Mapping[str, str], what: str) -> str:
    last = module.rsplit(".", 1)[-1]
    if last not in roles:
        raise StrategyError(
            f"{what} {module}: no tensor-parallel role is known for {last!r}; known: {sorted(roles)}"
        )
    return roles[last]


def _users(parameter: str, facts: ModelFacts) -> tuple[str, ...]:
    """The modules that use a parameter: its own, and those tied to it."""
    own = (parameter.rsplit(".", 1)[0],)
    return TIED.get(parameter, own) if facts.tie_word_embeddings else own


def _shared_role(parameter: str, modules: Sequence[str]) -> str:
    roles = {_role(module, PARAMETER_ROLES, "parameter") for module in modules}
    assert len(roles) == 1, f"{parameter} is cut in two ways {roles} by the modules {modules} that share it"
    return roles.pop()


def _stage_of(module: str, pipeline: Pipeline) -> Stage:
    """The stage that runs `module`: by layer number, the first stage before the layers, the last after them."""
    if module.startswith("layers."):
        layer = int(module.split(".")[1])
        return next(
            stage for stage in pipeline.stages if any(first <= layer <= last for first, last in stage.chunks)
        )
    return pipeline.stages[0] if module.startswith("embedding") else pipeline.stages[-1]


def _states(role: str, tp: int, facts: ModelFacts, sequence_parallel: bool) -> DistributedStates:
    """The bottom tier of one context-parallel part of one stage."""
    if role == KV and tp > facts.num_query_groups:
        return DistributedStates.of({0: facts.num_query_groups, DUPLICATE: tp // facts.num_query_groups})
    if role == SEQUENCE:
        return DistributedStates.of({0 if sequence_parallel else DUPLICATE: tp})
    return DistributedStates.of({{COLUMN: 0, KV: 0, ROW: 1, WHOLE: DUPLICATE, GATHERED: DUPLICATE}[role]: tp})


def _union(
    stages: Sequence[Stage], role: str, facts: ModelFacts, sequence_parallel: bool, hdim: int
) -> Annotation:
    """A subgroup for every context-parallel part: each has tokens of its own and a copy of every parameter."""
    parts = [part for stage in stages for part in stage.parts]
    states = tuple(_states(role, len(part), facts, sequence_parallel) for part in parts)
    return Annotation(tuple(map(DeviceGroup, parts)), states, hdim if len(parts) > 1 else DUPLICATE)
