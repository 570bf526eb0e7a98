"""FLOPs, bytes and analytic seconds of a Llama's units on one kind of device (paper A.1, Table 6)."""

from dataclasses import dataclass

from hetero_megatron.cluster import DeviceKind, model_of
from hetero_megatron.device_specs import spec_of
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.planner.curves import Curve
from hetero_megatron.planner.profiles import Phase, Unit
from hetero_megatron.planner.rates import MEMORY_SHARE, sustained_flops

ITEM = {"fp32": 4, "bf16": 2}
FP32 = 4
UPDATE_BYTES = 32
"""Per element of the optimizer: gradient (for the norm, and again), master weight and two moments read, the last three
written, and the parameter written."""


@dataclass(frozen=True, slots=True)
class Work:
    """What tokens, and pairs of tokens, cost in a model."""

    config: LlamaConfig

    @property
    def layer_weights(self) -> int:
        """Elements of one layer's matrices."""
        c = self.config
        return 2 * c.hidden_size * (c.query_size + c.kv_size) + 3 * c.hidden_size * c.ffn_hidden_size

    @property
    def layer_parameters(self) -> int:
        """Elements of one layer, norms included."""
        return self.layer_weights + 2 * self.config.hidden_size

    @property
    def table(self) -> int:
        """Elements of the embedding, and of the head."""
        return self.config.vocab_size * self.config.hidden_size

    @property
    def pair_flops(self) -> int:
        """Forward FLOPs of attention per pair; causal, so half of them."""
        return 2 * self.config.query_size

    def layer_flops(self, tokens: float, pairs: float) -> float:
        """Forward FLOPs of one layer."""
        return 2 * self.layer_weights * tokens + self.pair_flops * pairs

    def curve(self, kind: DeviceKind, precision: str, tp: int, unit: Unit, phase: Phase) -> Curve:
        """Analytic seconds of one rank of a tensor-parallel group of `tp`; collectives of one node are in the rates."""
        rate, item = sustained_flops(kind, tp) * tp, ITEM[precision]
        if precision == "fp32" and model_of(kind.name) != "cpu":
            rate /= 2
        memory = memory_rate(kind)
        passes = 1.0 if phase == "forward" else 2.0
        if unit == "layer":
            if phase == "weight_gradient":
                return Curve(0.0, 2 * self.layer_weights / rate, 0.0)
            return Curve(0.0, passes * 2 * self.layer_weights / rate, passes * self.pair_flops / rate)
        if unit == "embedding":
            moved = self.config.hidden_size * (2 * item if phase == "forward" else 2 * FP32 + item)
            return Curve(0.0, moved / memory, 0.0)
        logits = self.config.vocab_size / tp * (item + 2 * FP32) / memory
        products = 2 * self.table / rate
        if phase == "weight_gradient":
            return Curve(0.0, products, 0.0)
        return Curve(0.0, passes * products + logits, 0.0)

    def recomputed(self, kind: DeviceKind, precision: str, tp: int) -> Curve:
        """What selective recomputation adds to a layer's backward: the core attention and the gate."""
        memory = memory_rate(kind)
        moved = 3 * self.config.ffn_hidden_size * ITEM[precision] / tp
        return Curve(0.0, moved / memory, self.pair_flops / (sustained_flops(kind, tp) * tp))

    def update_seconds(self, kind: DeviceKind, elements: float) -> float:
        """Analytic time of the optimizer for a rank's elements."""
        memory = memory_rate(kind)
        return elements * UPDATE_BYTES / memory


def memory_rate(kind: DeviceKind) -> float:
    """Bytes per second of an operator that only moves data; 5 bytes per 1000 FLOPs of an unlisted kind."""
    spec = spec_of(model_of(kind.name))
    # A device that was found to be slower is slower at everything.
    return MEMORY_SHARE * (
        spec.memory_gb_per_s * 1e9 * kind.flops / spec.flops if spec else kind.flops * 5e-3
    )
