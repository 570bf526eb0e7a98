"""Token embedding; its rows, the vocabulary, may be split over ranks (paper §4).

Shape legend: `T` packed tokens, `D` hidden; sizes are local.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_megatron.graph.signature import Signature
from hetero_megatron.layers.accumulate import gradient_of
from hetero_megatron.layers.initial import Initial
from hetero_megatron.layers.layer import Layer
from hetero_megatron.layers.token_ids import check_ids


class Embedding(Layer):
    """Row lookup; ids of other ranks' rows give zeros, so a vocabulary split makes the result Partial."""

    signature: ClassVar[Signature] = Signature.parse("t, v h -> t h", linear=True)

    def __init__(self, vocab_size: int, hidden_size: int, init_std: float) -> None:
        super().__init__()
        self.vocab_size, self.init_std = vocab_size, init_std
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, tokens_T: Tensor) -> Tensor:
        """[T, D]: the whole sum in one process, this rank's addend under a vocabulary split."""
        check_ids("token id", tokens_T, self.vocab_size)
        lo, hi = self.binding.bounds["weight"][0] if self.binding else (0, self.vocab_size)
        if hi - lo == self.vocab_size:
            return self._rows(tokens_T)
        local_T = tokens_T - lo
        outside_T = (local_T < 0).logical_or_(local_T >= hi - lo)
        rows_TD = self._rows(local_T.masked_fill_(outside_T, 0))
        return rows_TD.masked_fill(outside_T[:, None], 0.0)

    def _rows(self, ids_T: Tensor) -> Tensor:
        if self.binding is None or ids_T.device.type != "cpu":  # a GPU adds rows in an order that changes
            return F.embedding(ids_T, self.weight)
        rows_TD: Tensor = _Rows.apply(self.weight, ids_T)
        return rows_TD

    def initial(self) -> dict[str, Initial]:
        """Normal with the given standard deviation."""
        return {"weight": ("normal", self.init_std)}


class _Rows(torch.autograd.Function):
    """Rows of the weight; their gradients are added to its buffer, not to zeros of the weight's size."""

    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, ids_T: Tensor) -> Tensor:
        ctx.save_for_backward(ids_T)
        ctx.parameter = weight_VD
        return F.embedding(ids_T, weight_VD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        (dy_TD,), (ids_T,) = gradients, ctx.saved_tensors
        sum_VD = gradient_of(ctx.parameter)
        if sum_VD is None or sum_VD.dtype is not dy_TD.dtype:
            return torch.zeros_like(ctx.parameter).index_add_(0, ids_T, dy_TD), None
        sum_VD.index_add_(0, ids_T, dy_TD)
        return None, None
