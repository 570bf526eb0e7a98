"""Memory in closed form against the exact account of a Program."""

from dataclasses import replace

import pytest

from hetero_megatron.cluster import Cluster, DeviceKind, Link
from hetero_megatron.memory import estimate
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.profiles import RESERVED_BYTES, Kept, Profiles
from tests.planner.plans import CLUSTER, CONFIG, PLANS, SEQUENCE, costs, graph, idle, program


def peaks(priced: Costs, name: str) -> dict[int, int]:
    """What tensors take on each rank."""
    return {rank: parts.peak for rank, parts in priced.footprint.per_rank(PLANS[name]).items()}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", PLANS)
def test_closed_forms_are_never_below_the_exact_account_and_near_it(name: str, precision: str) -> None:
    item = {"bf16": 2, "fp32": 4}[precision]
    exact = {each.rank: each.parts.total for each in estimate(program(name), SEQUENCE, item)}
    found = peaks(costs(name, precision), name)
    assert found.keys() == exact.keys()
    ratios = {rank: found[rank] / exact[rank] for rank in exact}
    assert min(ratios.values()) >= 1.0, ratios
    assert max(ratios.values()) <= 1.03, ratios


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_on_cpus_norms_keep_more_and_are_counted_so(precision: str) -> None:
    cluster = Cluster.local_cpu(16)
    item = {"bf16": 2, "fp32": 4}[precision]
    exact = {
        each.rank: each.parts.total for each in estimate(program("unequal", cluster=cluster), SEQUENCE, item)
    }
    found = peaks(costs("unequal", precision, cluster=cluster), "unequal")
    ratios = [found[rank] / exact[rank] for rank in exact]
    assert min(ratios) >= 1.0
    assert max(ratios) <= 1.03


def test_a_tied_table_is_on_both_ends() -> None:
    from hetero_megatron.program import Program

    config = replace(CONFIG, tie_word_embeddings=True)
    for name in ("one rank", "two stages"):
        built = Program.build(graph(config), idle(PLANS[name], CLUSTER), config.facts, CLUSTER)
        exact = {each.rank: each.parts.total for each in estimate(built, SEQUENCE, 2)}
        found = peaks(costs(name, config=config), name)
        assert all(1.0 <= found[rank] / exact[rank] <= 1.03 for rank in exact), name


def test_what_was_measured_stands_in_the_place_of_the_formulas() -> None:
    plain = costs("one rank")
    layer = 123_456_789
    profiles = Profiles(
        kept=(Kept("h800", "bf16", "layer", 1, 1, 2 * SEQUENCE, SEQUENCE, layer),),
        reserved_bytes={"h800": 1000},
    )
    measured = Costs(CONFIG, CLUSTER, profiles, SEQUENCE)
    activations = measured.activation_bytes(PLANS["one rank"])[0]
    assert activations > 8 * layer
    difference = measured.memory(PLANS["one rank"])[0] - plain.memory(PLANS["one rank"])[0]
    assert difference == 1000 - RESERVED_BYTES + activations - plain.activation_bytes(PLANS["one rank"])[0]


def test_parameters_per_rank_are_those_of_the_exact_account() -> None:
    exact = {each.rank: each.parts.parameters for each in estimate(program("unequal"), SEQUENCE, 2)}
    found = costs("unequal").parameters(PLANS["unequal"])
    assert {rank: 2 * own for rank, own in found.items()} == exact


def test_without_a_profile_a_gpu_keeps_room_for_driver_and_libraries_and_a_cpu_does_not() -> None:
    for cluster, beside in ((CLUSTER, 3 * 2**29), (Cluster.local_cpu(16), 0)):
        priced = costs("two stages", cluster=cluster)
        tensors = peaks(priced, "two stages")
        assert priced.memory(PLANS["two stages"]) == {rank: peak + beside for rank, peak in tensors.items()}
    tiny = DeviceKind("h20", 2**31, 148e12, Link("nvlink", 900.0))
    assert Profiles().reserved(tiny) == 0
    assert Profiles(reserved_bytes={"h20": 7}).reserved(tiny) == 7
