"""From a strategy to an annotation plan and back: Megatron's tensor-parallel roles by module name (paper §4, C.3)."""

from collections.abc import Iterable, Mapping, Sequence

from hetero_megatron.annotation import DUPLICATE, Annotation, AnnotationPlan, DeviceGroup, DistributedStates
from hetero_megatron.errors import StrategyError
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
# The module at which each input enters.
INPUT_MODULES: Mapping[str, str] = {"tokens": "embedding", "targets": "loss"}


def annotate(
    strategy: Strategy,
    facts: ModelFacts,
    parameters: Iterable[str],
    reshards: Iterable[str],
    inputs: Iterable[str],
) -> AnnotationPlan:
    """The annotation plan of `strategy`: one entry for every leaf and every Reshard of the model.

    `parameters`, `reshards` and `inputs` are node names, such as `layers.3.wq.weight`, `layers.3.mlp_in`, `tokens`.
    """
    entries: dict[str, Annotation] = {}
    known: dict[tuple[object, ...], Annotation] = {}

    def entry(name: str, module: str, role: str, hdim: int) -> None:
        """Layers of one stage repeat: an annotation is made once per stages and role."""
        stages = tuple(_stage_of(module, pipeline) for pipeline in strategy.pipelines)
        key = (role, hdim, *map(id, stages))
        if key not in known:
            known[key] = _union(
                stages, [_states(role, stage, facts, strategy.sequence_parallel) for stage in stages], hdim
            )
        entries[name] = known[key]

    for name in inputs:
        entry(name, INPUT_MODULES[name], GATHERED, 0)
    for name in parameters:
        module = name.rsplit(".", 1)[0]
        entry(name, module, _role(module, PARAMETER_ROLES, "parameter"), DUPLICATE)
    for name in reshards:
        entry(name, name, _role(name, RESHARD_ROLES, "Reshard"), 0)
    return AnnotationPlan(entries)


def read_plan(plan: AnnotationPlan, counts: Sequence[tuple[int, int]], facts: ModelFacts) -> Strategy:
    """The strategy that `annotate` turns into `plan`, with (micro_batches, micro_batch_size) for each pipeline.

    Raises:
        StrategyError: the plan lacks an input, has another number of pipelines, or is not what `annotate` would
            write for the stages that it describes; the first entry that differs is named.
    """
    for name in INPUT_MODULES:
        if name not in plan:
            raise StrategyError(f"the annotation plan has no entry {name!r}, where pipelines begin and end")
    if plan["tokens"].hsize != len(counts):
        raise StrategyError(
            f"the annotation plan has {plan['tokens'].hsize} pipelines, micro-batch counts are given for {len(counts)}"
        )
    pipelines = tuple(
        Pipeline(micro_batches, size, _stages(plan, number))
        for number, (micro_batches, size) in enumerate(counts)
    )
    entries = [name for name in plan if name not in INPUT_MODULES]
    parameters = [name for name in entries if name.rsplit(".", 1)[-1] not in RESHARD_ROLES]
    reshards = [name for name in entries if name.rsplit(".", 1)[-1] in RESHARD_ROLES]
    split = any(states.split_dims for name in reshards for states in plan[name].states)
    strategy = Strategy(pipelines, sequence_parallel=split)
    wanted = annotate(strategy, facts, parameters, reshards, INPUT_MODULES)
    for name in plan:
        if plan[name] != wanted[name]:
            raise StrategyError(
                f"the annotation plan's {name} is {plan[name]}; with the stages that its inputs and entries describe "
                f"it would be {wanted[name]}, and other layouts have no strategy yet"
            )
    return strategy


def _stages(plan: AnnotationPlan, pipeline: int) -> tuple[Stage, ...]:
    """Consecutive layers on one group are one stage; the inputs show stages that hold no layer."""
    layers = sorted({int(name.split(".")[1]) for name in plan if name.startswith("layers.")})
    walk = [("tokens", None), *((f"layers.{layer}.entry", layer) for layer in layers), ("targets", None)]
    found: list[tuple[DeviceGroup, list[int]]] = []
    for name, layer in walk:
        if name not in plan or plan[name].hsize <= pipeline:
            raise StrategyError(f"the annotation plan has no entry {name!r} for pipeline {pipeline}")
        group = plan[name].groups[pipeline]
        if not found or found[-1][0] != group:
            found.append((group, []))
        found[-1][1].extend([] if layer is None else [layer])
    return tuple(Stage(group.ranks, (own[0], own[-1]) if own else None) for group, own in found)


def _role(module: str, roles: Mapping[str, str], what: str) -> str:
    last = module.rsplit(".", 1)[-1]
    if last not in roles:
        raise StrategyError(
            f"{what} {module}: no tensor-parallel role is known for {last!r}; known: {sorted(roles)}"
        )
    return roles[last]


def _stage_of(module: str, pipeline: Pipeline) -> Stage:
    """The stage that runs `module`: by layer number, the first stage before the layers, the last after them."""
    if module.startswith("layers."):
        layer = int(module.split(".")[1])
        return next(stage for stage in pipeline.stages if layer in stage.layer_numbers)
    return pipeline.stages[0] if module.startswith("embedding") else pipeline.stages[-1]


def _states(role: str, stage: Stage, facts: ModelFacts, sequence_parallel: bool) -> DistributedStates:
    """The bottom tier of one stage."""
    tp = stage.tensor_parallel_size
    if role == KV and tp > facts.num_query_groups:
        return DistributedStates.of({0: facts.num_query_groups, DUPLICATE: tp // facts.num_query_groups})
    if role == SEQUENCE:
        return DistributedStates.of({0 if sequence_parallel else DUPLICATE: tp})
    return DistributedStates.of({{COLUMN: 0, KV: 0, ROW: 1, WHOLE: DUPLICATE, GATHERED: DUPLICATE}[role]: tp})


def _union(stages: Sequence[Stage], states: Sequence[DistributedStates], hdim: int) -> Annotation:
    groups = tuple(DeviceGroup(stage.ranks) for stage in stages)
    return Annotation(groups, tuple(states), hdim if len(stages) > 1 else DUPLICATE)
