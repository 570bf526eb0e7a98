"""Deduction rules for one operator, by hand and against numpy (paper §6.1)."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from hetero_megatron.annotation import DUPLICATE, PARTIAL, Annotation, DeviceGroup, DistributedStates
from hetero_megatron.annotation.annotation import Region
from hetero_megatron.comm import assemble, shard
from hetero_megatron.errors import AnnotationError, GraphError
from hetero_megatron.graph import Derived, Signature, Symbol, derive, without_partial
from hetero_megatron.graph.axes import Order

LINEAR = Signature.parse("t i, o i -> t o", linear=True)
DOT = Signature.parse("a b c, c d -> a b d", linear=True)
ADD = Signature.parse("a b, a b -> a b", additive=True)
PRODUCT = Signature.parse("t f, t f -> t f")
NORM = Signature.parse("t h, h -> t h", indivisible=("h",))
LOSS = Signature.parse("t v, t ->", reduced=("v",))
# Same factors as attention, but multilinear, so that numpy can check it: y[t, g, r, k] = q[t, g, r, k] * k[t, g, k].
HEADS = Signature.parse("t (g r k), t (g k) -> t (g r k)", indivisible=("k",), exact=("g", "r"))
ATTENTION = Signature.parse(
    "t (g r k), t (g k), t (g k); segments -> t (g r k)", indivisible=("k",), exact=("g", "r")
)


def on(degree: int, *parts: dict[int, int]) -> list[Annotation]:
    return [Annotation.on(tuple(range(degree)), p) for p in parts]


def states(annotation: Annotation) -> Order:
    return annotation.states[0].order


def test_column_parallel_splits_the_output_and_leaves_the_input_gradient_partial() -> None:
    derived = derive(LINEAR, (), on(2, {-1: 2}, {0: 2}))
    assert states(derived.output) == ((1, 2),)
    assert [states(gradient) for gradient in derived.gradients] == [((-2, 2),), ((0, 2),)]


def test_row_parallel_makes_a_partial_output_and_split_gradients() -> None:
    derived = derive(LINEAR, (), on(2, {1: 2}, {1: 2}))
    assert states(derived.output) == ((-2, 2),)
    assert [states(gradient) for gradient in derived.gradients] == [((1, 2),), ((1, 2),)]


def test_replicated_computation_has_a_duplicate_gradient_not_a_partial_one() -> None:
    derived = derive(LINEAR, (), on(2, {-1: 2}, {-1: 2}))
    assert states(derived.output) == ((-1, 2),)
    assert [states(gradient) for gradient in derived.gradients] == [((-1, 2),), ((-1, 2),)]


def test_a_token_split_makes_the_norm_weight_gradient_partial() -> None:
    assert states(derive(NORM, (), on(4, {0: 4}, {-1: 4})).gradients[1]) == ((-2, 4),)


def test_partial_passes_a_linear_operator_and_its_gradient_comes_back_whole() -> None:
    derived = derive(LINEAR, (), on(2, {-2: 2}, {-1: 2}))
    assert states(derived.output) == ((-2, 2),)
    assert [states(gradient) for gradient in derived.gradients] == [((-1, 2),), ((-2, 2),)]


def test_a_sum_of_two_partial_values_is_partial() -> None:
    derived = derive(ADD, (), on(2, {-2: 2}, {-2: 2}))
    assert states(derived.output) == ((-2, 2),)
    assert [states(gradient) for gradient in derived.gradients] == [((-1, 2),), ((-1, 2),)]


def test_a_factor_reduced_inside_the_operator_leaves_a_duplicate_output() -> None:
    derived = derive(LOSS, (), on(2, {1: 2}, {-1: 2}))
    assert states(derived.output) == ((-1, 2),)
    assert states(derived.gradients[0]) == ((1, 2),)


def test_a_loss_over_split_tokens_is_partial() -> None:
    assert states(derive(LOSS, (), on(2, {0: 2}, {0: 2})).output) == ((-2, 2),)


def test_more_ranks_than_kv_heads_cut_query_heads_inside_a_group() -> None:
    derived = derive(ATTENTION, (("g", 2), ("k", 4), ("r", 4)), on(4, {1: 4}, {1: 2, -1: 2}, {1: 2, -1: 2}))
    assert states(derived.output) == ((1, 4),)
    assert [states(gradient) for gradient in derived.gradients] == [
        ((1, 4),),
        ((1, 2), (-2, 2)),
        ((1, 2), (-2, 2)),
    ]


def test_one_kv_head_is_held_by_all_ranks() -> None:
    derived = derive(ATTENTION, (("g", 1), ("k", 4), ("r", 8)), on(4, {1: 4}, {-1: 4}, {-1: 4}))
    assert states(derived.output) == ((1, 4),)
    assert states(derived.gradients[1]) == ((-2, 4),)


def test_top_and_bottom_tier_share_the_heads() -> None:
    groups, halves = (DeviceGroup((0, 1)), DeviceGroup((2, 3))), DistributedStates(((1, 2),))
    q = Annotation(groups, (halves, halves), 1)
    kv = Annotation(groups, (DistributedStates(((-1, 2),)),) * 2, 1)
    derived = derive(ATTENTION, (("g", 2), ("k", 4), ("r", 4)), (q, kv, kv))
    assert derived.output == q
    assert derived.gradients[1] == kv.replace([DistributedStates(((-2, 2),))] * 2)


def test_subgroups_with_different_tp_are_deduced_on_their_own() -> None:
    groups = (DeviceGroup((0, 1)), DeviceGroup((2,)))
    x = Annotation(groups, (DistributedStates(((-1, 2),)), DistributedStates()), 0)
    w = Annotation(groups, (DistributedStates(((0, 2),)), DistributedStates()))
    derived = derive(LINEAR, (), (x, w))
    assert derived.output == Annotation(groups, (DistributedStates(((1, 2),)), DistributedStates()), 0)
    assert derived.gradients[0] == x.replace([DistributedStates(((-2, 2),)), DistributedStates()])
    assert derived.gradients[1] == w.replace(hdim=-2)


@pytest.mark.parametrize(
    ("signature", "sizes", "operands", "message"),
    [
        (LINEAR, (), on(2, {1: 2}, {-1: 2}), "disagree on factor 'i': operand 0 is split into 2, operand 1 is whole"),
        (LINEAR, (), on(2, {0: 2}, {0: 2}), r"split on different factors \['o', 't'\] along the same 2 devices"),
        (LINEAR, (), on(2, {-2: 2}, {0: 2}), "operand 0 is Partial, so the others must be whole"),
        (LINEAR, (), on(2, {-2: 2}, {-2: 2}), "operand 0 is Partial, so the others must be whole"),
        (LINEAR, (), on(6, {0: 2, -1: 3}, {-1: 3, 0: 2}), "have no common axes: 2 does not divide 3"),
        (NORM, (), on(2, {-2: 2}, {-1: 2}), "operand 0 is Partial, and rule .* is not linear: reduce it first"),
        (NORM, (), on(2, {1: 2}, {0: 2}), "hidden features must stay whole by rule .*, but the states cut them into 2"),
        (NORM, (), on(2, {-1: 2}, {1: 2}), "operand 1 has 1 dims by rule .*, but its states cut dim 1"),
        (ADD, (), on(2, {-2: 2}, {-1: 2}), "operand 0 of a sum is Partial, operand 1 is not and would be added several"),
        (ADD, (), on(2, {-1: 2}, {-2: 2}), "operand 1 of a sum is Partial, operand 0 is not"),
        (LOSS, (), on(2, {1: 2}, {0: 2}), "different factors"),
        (Signature.parse("t v -> t", reduced=("v",)), (), on(8, {1: 2, 0: 2, -1: 2}), "Duplicate along two separate axes"),
        (ATTENTION, (("g", 2), ("r", 4)), on(4, {1: 4}, {1: 4}, {1: 4}),
         r"2 kv heads \(num_query_groups\) cannot be split over TP 4: split them over 2 and hold 2 copies"),
        (ATTENTION, (("g", 2), ("r", 4)), on(3, {1: 3}, {-1: 3}, {-1: 3}), "8 heads cannot be split over TP 3: the parts"),
        (ATTENTION, (("g", 2), ("r", 4)), on(4, {1: 4}, {-1: 2, 1: 2}, {-1: 2, 1: 2}), "disagree on factor 'g'"),
        (ATTENTION, (("g", 2), ("r", 4)), on(4, {1: 4}, {-1: 4}, {-1: 4}), "disagree on factor 'g'"),
        (Signature.parse("t (n k) -> t (n k)", indivisible=("k", "n")), (), on(2, {1: 2}), "head size must stay whole"),
        (Signature.parse("z -> z", indivisible=("z",)), (), on(2, {0: 2}), "factor 'z' must stay whole"),
        (Signature.parse("z -> z", exact=("z",)), (("z", 5),), on(2, {0: 2}), "5 of factor 'z' cannot be split over TP 2"),
        (Signature.parse("a b -> (a b)"), (("a", 2), ("b", 4)), on(2, {1: 2}),
         r"output dim '\(a b\)' is cut on 'b', but 'a' is not cut up"),
    ],
)  # fmt: skip
def test_what_no_rule_allows_is_refused(
    signature: Signature, sizes: tuple[tuple[str, int], ...], operands: list[Annotation], message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        derive(signature, sizes, operands)


def test_heads_of_unknown_size_cannot_reach_the_head_size() -> None:
    rule = Signature.parse("t (k g) -> t (k g)", indivisible=("k",))
    with pytest.raises(
        GraphError,
        match=r"of unknown size cannot be split over TP 2",
    ):
        derive(rule, (), on(2, {1: 2}))


def test_operands_on_other_groups_need_a_reshard() -> None:
    with pytest.raises(
        GraphError, match="operand 1 lives on other device groups than operand 0: a Reshard is missing"
    ):
        derive(LINEAR, (), (Annotation.on((0,)), Annotation.on((1,))))


def test_hdim_cannot_cut_two_factors() -> None:
    groups = tuple(DeviceGroup((rank,)) for rank in range(4))
    q = Annotation(groups, (DistributedStates(),) * 4, 1)
    with pytest.raises(GraphError, match=r"hdim \(1, -1\): operands disagree on factor 'g'"):
        derive(HEADS, (("g", 2), ("r", 2), ("k", 1)), (q, q.replace(hdim=-1)))
    alone = Signature.parse("t (g r) -> t (g r)")
    with pytest.raises(GraphError, match="HSize 4 would cut two factors"):
        derive(Signature.parse("(g r) -> g r"), (("g", 2), ("r", 2)), (q.replace(hdim=0),))
    assert derive(alone, (("g", 2), ("r", 2)), (q,)).output == q


def test_tokens_that_must_stay_whole_may_differ_between_subgroups() -> None:
    rule = Signature.parse("t h -> t h", indivisible=("t",))
    x = Annotation((DeviceGroup((0,)), DeviceGroup((1,))), (DistributedStates(),) * 2, 0)
    assert derive(rule, (("t", Symbol("T")),), (x,)).output == x
    with pytest.raises(GraphError, match=r"hdim \(0,\): tokens must stay whole"):
        derive(rule, (("t", 8),), (x,))


EINSUMS: dict[str, tuple[Signature, str, dict[str, int]]] = {
    "linear": (LINEAR, "ti,oi->to", {"t": 12, "i": 8, "o": 16}),
    "uneven linear": (LINEAR, "ti,oi->to", {"t": 7, "i": 5, "o": 9}),
    "dot": (DOT, "abc,cd->abd", {"a": 4, "b": 6, "c": 8, "d": 5}),
    "product": (PRODUCT, "tf,tf->tf", {"t": 6, "f": 10}),
    "sum": (ADD, "", {"a": 6, "b": 5}),
    "heads": (HEADS, "tgrk,tgk->tgrk", {"t": 4, "g": 4, "r": 6, "k": 3}),
}


def shape_of(dims: Sequence[Sequence[str]], sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(int(np.prod([sizes[factor] for factor in dim])) for dim in dims)


def compute(name: str, operands: Sequence[np.ndarray]) -> np.ndarray:
    """The operator on whole or local operands; local head counts are read off the widths, as layers do."""
    _, einsum, sizes = EINSUMS[name]
    if name == "sum":
        return operands[0] + operands[1]
    if name != "heads":
        return np.einsum(einsum, *operands)
    q, k = split_heads(operands[0], operands[1], sizes["k"])
    return (q * k).reshape(operands[0].shape)


def split_heads(q: np.ndarray, k: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    rows, groups = k.shape[0], k.shape[1] // size
    return q.reshape(rows, groups, q.shape[1] // k.shape[1], size), k.reshape(rows, groups, 1, size)


def gradients(name: str, operands: Sequence[np.ndarray], back: np.ndarray) -> list[np.ndarray]:
    _, einsum, sizes = EINSUMS[name]
    if name == "sum":
        return [back, back]
    if name == "heads":
        q, k = split_heads(operands[0], operands[1], sizes["k"])
        b, _ = split_heads(back, operands[1], sizes["k"])
        return [(b * k).reshape(operands[0].shape), (b * q).sum(2).reshape(operands[1].shape)]
    inputs, output = einsum.split("->")
    first, second = inputs.split(",")
    return [
        np.einsum(f"{output},{second}->{first}", back, operands[1]),
        np.einsum(f"{output},{first}->{second}", back, operands[0]),
    ]


def window(region: Region, shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in region.bounds(shape))


def merged(axes: Sequence[tuple[int, int]]) -> dict[int, int] | None:
    """An order from (dim, parts) per axis, or None where a dim would stand twice."""
    order: list[list[int]] = []
    for dim, parts in axes:
        if order and order[-1][0] == dim:
            order[-1][1] *= parts
        elif any(dim == listed for listed, _ in order):
            return None
        else:
            order.append([dim, parts])
    return {each[0]: each[1] for each in order}


def random_operands(name: str, rng: random.Random) -> list[Annotation] | None:
    """Operands cut along random axes, each on one factor, on copies, or on addends of one operand."""
    signature, _, sizes = EINSUMS[name]
    factors = [factor for factor in sizes if factor not in signature.indivisible]
    hsize = rng.choice((1, 1, 2, 3))

    def axis(parts: int) -> list[tuple[int, int]]:
        kind = rng.choice([*factors, *factors, "copies", "addends"])
        if kind == "addends" and signature.linear:
            holder = rng.randrange(2)
            both = signature.additive
            return [(PARTIAL if both or place == holder else DUPLICATE, parts) for place in range(2)]
        dims = [signature.factor_dim(place, kind) for place in range(2)]
        return [(DUPLICATE if dim is None else dim, parts) for dim in dims]

    top = axis(hsize)
    groups, unions = [], ([], [])
    ranks = rng.sample(range(40), 40)
    for _ in range(hsize):
        axes = [axis(rng.choice((2, 2, 3))) for _ in range(rng.randrange(3))]
        orders = [merged([each[place] for each in axes]) for place in range(2)]
        if None in orders:
            return None
        degree = int(np.prod([each[0][1] for each in axes], initial=1))
        groups.append(DeviceGroup(tuple(ranks.pop() for _ in range(degree))))
        for union, order in zip(unions, orders, strict=True):
            union.append(DistributedStates.of(order or {}))
    hdims = [dim if hsize > 1 else DUPLICATE for dim, _ in top]
    return [Annotation(tuple(groups), tuple(u), hdim) for u, hdim in zip(unions, hdims, strict=True)]


def check_with_numpy(name: str, operands: list[Annotation], derived: Derived, seed: int) -> None:
    """Every rank computes on its shards; the shards of output and gradients must make the whole tensors."""
    signature, _, sizes = EINSUMS[name]
    rng = np.random.default_rng(seed)
    shapes = [shape_of(dims, sizes) for dims in signature.operands]
    whole = [rng.integers(-4, 5, shape).astype(np.float64) for shape in shapes]
    shards = [
        shard(a, full, seed + place) for place, (a, full) in enumerate(zip(operands, whole, strict=True))
    ]
    result = compute(name, whole)
    local = {rank: compute(name, [held[rank] for held in shards]) for rank in derived.output.ranks}
    np.testing.assert_array_equal(assemble(derived.output, local, result.shape), result)

    back = rng.integers(-4, 5, result.shape).astype(np.float64)
    returned = without_partial(derived.output)
    local_back = {
        rank: gradients(
            name, [held[rank] for held in shards], back[window(returned.region(rank), result.shape)]
        )
        for rank in returned.ranks
    }
    for place, expected in enumerate(gradients(name, whole, back)):
        pieces = {rank: found[place] for rank, found in local_back.items()}
        np.testing.assert_array_equal(assemble(derived.gradients[place], pieces, shapes[place]), expected)


@pytest.mark.parametrize("name", EINSUMS)
def test_what_ranks_compute_is_what_the_rules_say(name: str) -> None:
    done = 0
    for seed in range(400):
        operands = random_operands(name, random.Random(f"{name} {seed}"))
        if operands is None:
            continue
        sizes = tuple(EINSUMS[name][2].items())
        try:
            derived = derive(EINSUMS[name][0], sizes, operands)
            without_partial(derived.output)
        except (GraphError, AnnotationError):
            continue
        try:
            check_with_numpy(name, operands, derived, seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {[str(each) for each in operands]}") from error
        done += 1
    assert done > 60, f"only {done} layouts of {name} were checked"
