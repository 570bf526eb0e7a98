"""Sum of token losses over logits whose vocabulary may be split over ranks (DESIGN decision 6).

Shape legend: `T` packed tokens, `V` vocabulary; sizes are local.
"""

from typing import ClassVar

from torch import Tensor

from hetero_megatron.errors import LayerError
from hetero_megatron.graph.signature import Signature
from hetero_megatron.layers.kernels.cross_entropy import Reduce, cross_entropy_sum
from hetero_megatron.layers.layer import Layer
from hetero_megatron.layers.token_ids import check_ids
from hetero_megatron.runtime.binding import Binding


class CrossEntropy(Layer):
    """FP32 sum of -log softmax(logits)[target] over targets other than IGNORE; 0.0 when there is none.

    The sum, not the mean: the one divisor of a step is the number of valid targets of all pipelines.
    """

    signature: ClassVar[Signature] = Signature.parse("t v, t -> ", reduced=("v",))

    _split: Reduce | None = None
    _first_id: int = 0

    def bind(self, binding: Binding) -> None:
        """Learn this rank's columns [lo, hi) from `bounds['logits']`, and how to reduce over the others."""
        super().bind(binding)
        self._split = binding.reductions.get("v")
        self._first_id = binding.bounds["logits"][-1][0]

    def forward(self, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        """Scalar loss sum, the same on all ranks that share the vocabulary.

        Raises:
            LayerError: logits and targets differ in length, the shard is not as wide as bound, or a target is
                beyond the vocabulary.
        """
        tokens, columns = logits_TV.shape
        if targets_T.shape != (tokens,):
            shape = tuple(targets_T.shape)
            raise LayerError(f"cross-entropy: logits of {tokens} tokens, targets of shape {shape}")
        vocab_size = columns
        if self.binding:
            lo, hi = self.binding.bounds["logits"][-1]
            if hi - lo != columns:
                raise LayerError(f"cross-entropy: {columns} logits per token, this rank has ids [{lo}, {hi})")
            vocab_size = self.binding.full_shapes["logits"][-1]
        check_ids("target id", targets_T, vocab_size)
        kernel = self.kernel("cross_entropy", cross_entropy_sum)
        loss: Tensor = kernel(logits_TV, targets_T, self._first_id, self._split)
        return loss
