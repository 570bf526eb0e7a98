"""Steps that Sailor measured on real clusters, and its layer profiles, turned into Profiles, clusters and strategies.

Numbers from eth-easl/sailor at cf2c8e3 (MIT, ETH Zurich): measured steps and peak memory from Planner/simulations/
validation, times of OPT-350M per device from its layer profiles, those of GPT-Neo-2.7B and the bytes of activations from
profiles_tmp.json and llm_info.json, bandwidths from multizone_bandwidths_het.json and intra_node_bandwidths.json.
Training was Megatron-DeepSpeed in FP32. Two measured rows are left out: GPT-Neo N4_D4 has the number of layers of the
other model and a step as long as its gradient reduction, and mixed N6_D2 repeats N3_D1 to the last digit.

How stages send is one rule, DeepSpeed's own: between tensor-parallel stages every rank sends its part of an activation or
gradient, behind a short message with its sizes, and the receiving ranks gather the whole inside their node
(`PartitionedTensor` in deepspeed/runtime/pipe). Mean errors on (OPT on GH200, GPT-Neo on GH200, OPT on mixed nodes):
- as it stands: 10.0% (9.97), 9.2%, 8.5%;
- without the short message and the gathering: 10.3%, 9.8%, 8.6%; if every rank sent all of it: 8.6%, 6.2%, 94.5%;
- without the rule that a smaller micro-batch takes no longer than a larger one (`planner/curves.py`): 17.2%, 9.1%,
  8.5%: the profile has 2.4 ms for a layer's forward pass on one sequence and 1.5 ms on two.
Both rules were written with the measured steps in view, so that these rows are no blind test.
That ranks of a mixed node share one adapter is no choice: its bandwidth is the same for one pair of ranks and for eight
(25.3% on the mixed rows if each had its own). The formulas of Sailor's simulator, written out once more and
run on the same profile: 16.0% on OPT on GH200 and 10.3% on the mixed rows; 8.9% on OPT with profiles_tmp.json, whose
forward passes of short micro-batches are smaller.
"""

from dataclasses import dataclass
from math import log2

from hetero_megatron.cluster import Cluster, Device, DeviceKind, Link
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.profiles import Kept, Measurement, Profiles, Transfer
from hetero_megatron.strategy import Pipeline, Stage, Strategy

SEQUENCE = 2048
MB = 10**6
STATE_BYTES = 24
"""Per parameter: FP32 value, gradient, two Adam moments, and two more copies that DeepSpeed makes."""
BESIDE = {"gh": 5_060_000_000, "mixed": 3_500_000_000}
"""Bytes that fused kernels, CUDA and NCCL take: as Sailor gives them for GH200; fitted to the six TP8 rows of the others."""


@dataclass(frozen=True, slots=True)
class Row:
    """A plan and what it took: layers per stage count the embedding and the head; device kinds by stage and replica."""

    cluster: str
    model: str
    name: str
    tp: int
    layers: tuple[int, ...]
    kinds: tuple[tuple[str, ...], ...]
    micro_batch_size: int
    global_batch_size: int
    seconds: float
    peak_bytes: int


# Sizes whose parameter counts are those of the models; the width of the feed-forward block stands for its two matrices.
MODELS = {
    "opt": LlamaConfig(24, 1024, 2735, 16, 16, 51328),
    "neo": LlamaConfig(32, 2560, 6831, 32, 32, 51310),
}
# (model, device, tp, micro-batch size): microseconds of embedding forward and backward, a layer's forward and backward,
# head forward and backward, and the update.
TIMES: dict[tuple[str, str, int, int], tuple[int, ...]] = {
    ("opt", "gh-96", 4, 1): (967, 2, 2389, 1728, 2405, 1663, 447),
    ("opt", "gh-96", 4, 2): (456, 2, 1510, 1845, 1632, 1493, 429),
    ("opt", "gh-96", 4, 4): (630, 2, 1802, 3320, 2424, 2579, 472),
    ("opt", "gh-96", 4, 8): (922, 1, 2697, 6470, 4014, 5944, 479),
    ("opt", "rtx-3090", 2, 2): (1105, 2, 5608, 13036, 10105, 14792, 2577),
    ("opt", "rtx-3090", 8, 2): (18533, 2, 37538, 39644, 2892, 22585, 868),
    ("opt", "rtx-2080", 2, 2): (4739, 2, 17041, 30356, 20112, 35334, 4598),
    ("opt", "rtx-2080", 8, 2): (7675, 2, 16603, 20119, 6210, 14632, 1469),
    ("opt", "titan-rtx", 2, 2): (4768, 2, 16693, 29210, 19002, 33385, 4271),
    ("opt", "titan-rtx", 8, 2): (6495, 2, 13888, 17401, 5318, 13428, 1443),
    ("neo", "gh-96", 4, 1): (550, 1, 1507, 2309, 984, 406, 876),
    ("neo", "gh-96", 4, 4): (1099, 2, 3211, 7255, 445, 548, 858),
}
# (model, tp): bytes that embedding, a layer and the head keep of one sequence.
KEPT: dict[tuple[str, int], tuple[int, int, int]] = {
    ("opt", 2): (8407040, 192954368, 423652352),
    ("opt", 4): (8407040, 109090133, 218131456),
    ("opt", 8): (8407040, 67125248, 113273856),
    ("neo", 2): (26232832, 388005888, 41970688),
    ("neo", 4): (26232832, 244285440, 41970688),
}
ROWS: tuple[Row, ...] = (
    Row("gh", "neo", "N16_D4", 4, (7, 9, 9, 9), (("gh-96",) * 4,) * 4, 4, 1024, 7.03897, 37281071104),
    Row("gh", "neo", "N16_D8", 4, (16, 18), (("gh-96",) * 8,) * 2, 4, 1024, 6.4286, 44033900544),
    Row("gh", "neo", "N2_D1", 4, (16, 18), (("gh-96",) * 1,) * 2, 1, 1, 0.2079, 16258170880),
    Row("gh", "neo", "N32_D16", 4, (16, 18), (("gh-96",) * 16,) * 2, 4, 1024, 3.42667, 44776292352),
    Row("gh", "neo", "N32_D8", 4, (7, 9, 9, 9), (("gh-96",) * 8,) * 4, 4, 1024, 3.69588, 37493932032),
    Row("gh", "neo", "N4_D1", 4, (7, 9, 9, 9), (("gh-96",) * 1,) * 4, 1, 64, 2.50204, 15817768960),
    Row("gh", "neo", "N4_D2", 4, (16, 18), (("gh-96",) * 2,) * 2, 1, 64, 2.29028, 20011024384),
    Row("gh", "neo", "N64_D16", 4, (7, 9, 9, 9), (("gh-96",) * 16,) * 4, 4, 1024, 2.00042, 37381734400),
    Row(
        "gh",
        "neo",
        "N64_D8",
        4,
        (3, 5, 5, 5, 4, 4, 4, 4),
        (("gh-96",) * 8,) * 8,
        4,
        1024,
        2.25506,
        43010490368,
    ),
    Row("gh", "neo", "N8_D2", 4, (7, 9, 9, 9), (("gh-96",) * 2,) * 4, 4, 1024, 13.86466, 28541190144),
    Row("gh", "neo", "N8_D4", 4, (16, 18), (("gh-96",) * 4,) * 2, 4, 1024, 12.66101, 43814748160),
    Row("gh", "opt", "N1_D1_M4_G1", 4, (26,), (("gh-96",) * 1,) * 1, 1, 1, 0.07359, 9551478784),
    Row("gh", "opt", "N1_D1_M4_G32", 4, (26,), (("gh-96",) * 1,) * 1, 1, 32, 2.28123, 9805234176),
    Row("gh", "opt", "N16_D16", 4, (26,), (("gh-96",) * 16,) * 1, 8, 1024, 1.92557, 32560381952),
    Row("gh", "opt", "N16_D4", 4, (5, 7, 7, 7), (("gh-96",) * 4,) * 4, 8, 1024, 2.72578, 25140658176),
    Row("gh", "opt", "N16_D8", 4, (12, 14), (("gh-96",) * 8,) * 2, 8, 1024, 2.31116, 26941063168),
    Row("gh", "opt", "N2_D1", 4, (12, 14), (("gh-96",) * 1,) * 2, 8, 32, 0.65705, 26942111744),
    Row("gh", "opt", "N2_D2", 4, (26,), (("gh-96",) * 2,) * 1, 2, 32, 0.8048, 12540968960),
    Row("gh", "opt", "N32_D16", 4, (12, 14), (("gh-96",) * 16,) * 2, 8, 1024, 1.22476, 26960986112),
    Row("gh", "opt", "N32_D32", 4, (26,), (("gh-96",) * 32,) * 1, 8, 1024, 1.02594, 32996589568),
    Row("gh", "opt", "N32_D8", 4, (5, 7, 7, 7), (("gh-96",) * 8,) * 4, 8, 1024, 1.47485, 25218252800),
    Row("gh", "opt", "N4_D1", 4, (5, 7, 7, 7), (("gh-96",) * 1,) * 4, 1, 64, 1.60196, 7358906368),
    Row("gh", "opt", "N4_D2", 4, (12, 14), (("gh-96",) * 2,) * 2, 1, 64, 1.44523, 7976517632),
    Row("gh", "opt", "N4_D4", 4, (26,), (("gh-96",) * 4,) * 1, 4, 128, 1.23516, 19244515328),
    Row("gh", "opt", "N8_D2", 4, (5, 7, 7, 7), (("gh-96",) * 2,) * 4, 8, 512, 2.69795, 25248661504),
    Row("gh", "opt", "N8_D4", 4, (12, 14), (("gh-96",) * 4,) * 2, 8, 512, 2.2988, 26850885632),
    Row("mixed", "opt", "N2_D1", 2, (12, 14), (("rtx-3090",), ("titan-rtx",)), 2, 256, 119.83914, 4130340864),
    Row("mixed", "opt", "N2_D2", 2, (26,), (("titan-rtx", "rtx-3090"),), 2, 256, 91.78, 5946474496),
    Row(
        "mixed",
        "opt",
        "N3_D1",
        8,
        (8, 9, 9),
        (("rtx-3090",), ("rtx-2080",), ("titan-rtx",)),
        2,
        144,
        59.45533,
        6305087488,
    ),
    Row(
        "mixed",
        "opt",
        "N4_D1",
        8,
        (5, 7, 7, 7),
        (("rtx-3090",), ("rtx-2080",), ("titan-rtx",), ("rtx-2080",)),
        2,
        256,
        83.76622,
        6233784320,
    ),
    Row(
        "mixed",
        "opt",
        "N4_D2",
        8,
        (12, 14),
        (("rtx-3090", "rtx-2080"), ("titan-rtx", "rtx-2080")),
        2,
        256,
        66.06712,
        6818889728,
    ),
    Row(
        "mixed",
        "opt",
        "N4_D4",
        8,
        (26,),
        (("rtx-3090", "rtx-2080", "titan-rtx", "rtx-2080"),),
        2,
        256,
        83.45238,
        9387900928,
    ),
    Row(
        "mixed",
        "opt",
        "N6_D3",
        8,
        (12, 14),
        (("rtx-3090", "rtx-2080", "rtx-2080"), ("titan-rtx", "rtx-2080", "titan-rtx")),
        2,
        288,
        54.2392,
        6835666944,
    ),
    Row(
        "mixed",
        "opt",
        "N6_D6",
        8,
        (26,),
        (("rtx-3090", "rtx-2080", "rtx-2080", "titan-rtx", "rtx-2080", "titan-rtx"),),
        2,
        288,
        70.78508,
        9371123712,
    ),
)

# GB/s as a x^2 + b x + c of x = log2(MB): one adapter of a GH200 node, of which it has one per device; the one adapter
# of a node with consumer devices, slow towards RTX 3090 and among all kinds, fast between nodes of one kind.
RATES = {
    "slingshot": (-0.16570216, 2.79431173, 11.74409677),
    "slow": (-3.7061267e-05, 0.000628011631, 0.111391008),
    "fast": (-0.000924772745, 0.0100507644, 2.83913787),
}
# The same inside a node, for all ranks of the tensor-parallel group together.
INSIDE_RATES = {
    ("gh-96", 4): (-0.75177369, 26.46781337, 82.0621593),
    ("rtx-3090", 2): (-0.20465065, 5.5235483, 18.34015839),
    ("rtx-3090", 8): (-0.01911446, 0.28085392, 4.33201444),
    ("rtx-2080", 2): (-0.09370207, 1.32821908, 6.39819591),
    ("rtx-2080", 8): (-0.24085997, 2.90752869, 17.4770778),
    ("titan-rtx", 2): (-0.08825343, 1.22809771, 6.88196791),
    ("titan-rtx", 8): (-0.20205836, 2.62227596, 16.80709202),
}
SLINGSHOT = Link("slingshot", 23.0)
SLOW, FAST = Link("slow", 0.115, shared=True), Link("fast", 2.84, shared=True)
SHORT = 64
"""Bytes of the message that says how a tensor is cut."""


def _transfers(link: str, rate: tuple[float, float, float], operation: str, ranks: int) -> list[Transfer]:
    a, b, c = rate
    found = []
    for size in (2**k for k in range(0, 9)):
        seconds = size * MB / ((a * log2(size) ** 2 + b * log2(size) + c) * 1e9)
        found.append(Transfer(link, operation, ranks, size * MB, seconds))  # type: ignore[arg-type]
    return found


class DeepSpeedCosts(Costs):
    """The cost model with DeepSpeed's way to send between stages of equal degree."""

    def boundary(self, sender: Stage, receiver: Stage, tokens: int) -> float:
        """A short message, each rank's part, and the gathering of the parts in the receiving stage."""
        link = self.cluster.link(sender.ranks[0], receiver.ranks[0])
        short = self.profiles.transfer_seconds(link, "p2p", 2, SHORT)
        kind, tp = self.cluster.kind(receiver.ranks[0]), len(receiver.ranks)
        whole = tokens * self.config.hidden_size * self.item
        gather = self.profiles.transfer_seconds(kind.link, "all_gather", tp, whole)
        return super().boundary(sender, receiver, tokens) + short + gather


def profiles(model: str) -> Profiles:
    """Sailor's profile of a model as ours."""
    measurements, updates = [], {}
    for (own, kind, tp, size), times in TIMES.items():
        if own != model:
            continue
        *phases, update = times
        units = [
            (unit, phase) for unit in ("embedding", "layer", "head") for phase in ("forward", "backward")
        ]
        for (unit, phase), took in zip(units, phases, strict=True):
            measurements.append(
                Measurement(kind, "fp32", unit, phase, tp, 1, size * SEQUENCE, SEQUENCE, took * 1e-6)  # type: ignore[arg-type]
            )
        updates[kind] = max(updates.get(kind, 0.0), update * 1e-6)
    transfers = []
    for link, rate in RATES.items():
        transfers += _transfers(link, rate, "p2p", 2)
    for (kind, tp), rate in INSIDE_RATES.items():
        transfers += _transfers(f"inside {kind}", rate, "all_gather", tp)
    kept = [
        Kept(kind, "fp32", unit, tp, 1, SEQUENCE, SEQUENCE, amount)  # type: ignore[arg-type]
        for (own, tp), amounts in KEPT.items()
        if own == model
        for kind in updates
        for unit, amount in zip(("embedding", "layer", "head"), amounts, strict=True)
    ]
    return Profiles(
        measurements=tuple(measurements),
        transfers=tuple(transfers),
        kept=tuple(kept),
        fixed_seconds=updates,
    )


def strategy_of(row: Row) -> tuple[Strategy, Cluster]:
    """The plan, a node for every stage of every replica."""
    replicas, config = len(row.kinds[0]), MODELS[row.model]
    count = row.global_batch_size // (row.micro_batch_size * replicas)
    ends = [sum(row.layers[:stage]) for stage in range(len(row.layers) + 1)]
    devices: list[Device] = []
    pipelines = []
    for replica in range(replicas):
        stages = []
        for stage, kinds in enumerate(row.kinds):
            node = replica * len(row.kinds) + stage
            ranks = tuple(range(len(devices), len(devices) + row.tp))
            devices += [Device(rank, kinds[replica], node) for rank in ranks]
            # The first number is the embedding, the last one the head.
            first, last = max(0, ends[stage] - 1), min(config.num_layers - 1, ends[stage + 1] - 2)
            stages.append(Stage(ranks, (first, last)))
        pipelines.append(Pipeline(count, row.micro_batch_size, tuple(stages)))
    names = tuple(dict.fromkeys(device.kind for device in devices))
    kinds = tuple(DeviceKind(name, 96 * 10**9, 1e14, Link(f"inside {name}", 100.0)) for name in names)
    alike = tuple((name, name, FAST) for name in names if name in ("rtx-2080", "titan-rtx"))
    if row.cluster == "gh":
        return Strategy(tuple(pipelines)), Cluster(tuple(devices), kinds, SLINGSHOT)
    return Strategy(tuple(pipelines)), Cluster(tuple(devices), kinds, SLOW, alike)


def costs_of(row: Row) -> tuple[Costs, Strategy]:
    """What prices the row's plan."""
    strategy, cluster = strategy_of(row)
    costs = DeepSpeedCosts(MODELS[row.model], cluster, profiles(row.model), SEQUENCE, "fp32")
    return costs, strategy


def peak_bytes(row: Row) -> float:
    """Predicted peak of the fullest rank: activations in flight as ours, states as DeepSpeed keeps them."""
    costs, strategy = costs_of(row)
    parameters = costs.parameters(strategy)
    activations = costs.activation_bytes(strategy)
    return max(
        STATE_BYTES * parameters[rank] + activations[rank] + BESIDE[row.cluster] for rank in strategy.ranks
    )
