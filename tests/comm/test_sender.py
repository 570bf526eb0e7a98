"""The choice among owners agrees with trying all of them (paper §5.3)."""

import random

import pytest

from hetero_megatron.cluster import Cluster, Device, DeviceKind, Link
from hetero_megatron.comm.sender import Amount, Sender


@pytest.mark.parametrize("between", [50.0, 100.0, 400.0])
def test_the_heaps_choose_what_a_full_scan_chooses(between: float) -> None:
    kind = DeviceKind("one", 1, 1.0, Link("inside", 100.0))
    cluster = Cluster(
        tuple(Device(rank, "one", rank // 4) for rank in range(16)), (kind,), Link("between", between)
    )
    rng = random.Random(7)
    sender, load = Sender(cluster), dict[tuple[str, int], Amount]()
    for _ in range(300):
        owners = rng.sample(range(16), rng.randint(1, 8))
        choice, weight = sender.among(owners), rng.randint(1, 5)
        for receiver in rng.sample([rank for rank in range(16) if rank not in owners], 3):
            links = {owner: cluster.link(owner, receiver) for owner in owners}
            fastest = max(link.gb_per_s for link in links.values())
            best = min(
                (owner for owner in owners if links[owner].gb_per_s == fastest),
                key=lambda owner: load.get((links[owner].name, owner), 0),
            )
            assert choice.to(receiver, weight) == best
            key = (links[best].name, best)
            load[key] = load.get(key, 0) + weight
