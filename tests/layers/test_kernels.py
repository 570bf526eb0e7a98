"""Every backend against plain mathematics; those that cannot run here are skipped with their own reason (`-rs`).

The libraries that need a GPU are stood in for by modules with their documented signatures, which read their
arguments as the library would: the code around them runs here, the libraries do not.
"""

import math
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_megatron.layers import document_borders
from hetero_megatron.layers.kernels import KERNELS, Facts, Kernel
from hetero_megatron.layers.kernels import multi_tensor as multi_tensor_module
from hetero_megatron.runtime.batch import IGNORE, Segments
from tests.layers.backends import Here, backends, here

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 24
FACTS = Facts(HEAD_DIM)
LENGTHS = [(7, 9, 5), (1, 1, 13), (0, 5, 0, 4), (16,), (3, 3, 3), (1,), (0, 1, 0)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Attention.


def masked_softmax(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, borders: list[int]) -> Tensor:
    """Scores of all pairs, -inf where a token may not look."""
    lengths = torch.tensor(borders, device=q_THK.device).diff()
    document = torch.repeat_interleave(torch.arange(len(lengths), device=q_THK.device), lengths)
    order = torch.arange(len(document), device=q_THK.device)
    allowed = (document[:, None] == document[None, :]) & (order[:, None] >= order[None, :])
    k_THK, v_THK = (x.repeat_interleave(q_THK.shape[1] // x.shape[1], 1) for x in (k_THK, v_THK))
    scores = torch.einsum("thk,shk->hts", q_THK, k_THK) / math.sqrt(q_THK.shape[2])
    return torch.einsum("hts,shk->thk", scores.masked_fill(~allowed, -math.inf).softmax(-1), v_THK)


def qkv(at: Here, tokens: int, kv_heads: int = KV_HEADS) -> list[Tensor]:
    heads = (HEADS, kv_heads, kv_heads)
    shapes = [(tokens, count, HEAD_DIM) for count in heads]
    return [draw(*s, seed=n).to(at.device, at.dtype).requires_grad_() for n, s in enumerate(shapes)]


def attended(at: Here, inputs: list[Tensor], lengths: tuple[int, ...]) -> Tensor:
    segments = Segments.of_lengths(lengths, at.device)
    return at.operator(*inputs, segments, document_borders()(segments, at.device, torch.int32))


def check_attention(at: Here, lengths: tuple[int, ...], kv_heads: int = KV_HEADS) -> None:
    inputs = qkv(at, sum(lengths), kv_heads)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted = masked_softmax(*exact, list(Segments.of_lengths(lengths).cu_seqlens))
    result = attended(at, inputs, lengths)
    assert result.shape == inputs[0].shape
    assert result.dtype is at.dtype
    weights = draw(*result.shape, seed=9).to(at.device)
    torch.testing.assert_close(result.double(), wanted, **at.tolerances)
    found = torch.autograd.grad(result, inputs, weights.to(at.dtype))
    for gradient, right in zip(found, torch.autograd.grad(wanted, exact, weights.double()), strict=True):
        torch.testing.assert_close(gradient.double(), right, **at.tolerances)


@backends("attention")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_attention_is_a_masked_softmax_forward_and_backward(
    kernel: Kernel, kv_heads: int, lengths: tuple[int, ...]
) -> None:
    check_attention(here(kernel, FACTS), lengths, kv_heads)


@backends("attention")
def test_attention_leaks_nothing_over_a_border_in_either_direction(kernel: Kernel) -> None:
    at = here(kernel, FACTS)
    inputs = qkv(at, 21)
    before = attended(at, inputs, (7, 9, 5))
    changed = [x.detach().clone() for x in inputs]
    for x in changed:
        x[10] += 3.0
    after = attended(at, changed, (7, 9, 5))
    assert torch.equal(after[:10], before[:10])
    assert torch.equal(after[16:], before[16:])
    assert not torch.equal(after[10:16], before[10:16])
    for gradient in torch.autograd.grad(before[7:16].float().sum(), inputs):
        assert not gradient[:7].any()
        assert not gradient[16:].any()
        assert gradient[7:16].any()


@backends("attention")
def test_attention_over_no_token_is_empty(kernel: Kernel) -> None:
    at = here(kernel, FACTS)
    assert attended(at, qkv(at, 0), (0,)).shape == (0, HEADS, HEAD_DIM)


# RMSNorm.


def check_rms_norm(at: Here, tokens: int) -> None:
    inputs = [
        x.to(at.device, at.dtype).requires_grad_() for x in (draw(tokens, HIDDEN), draw(HIDDEN, seed=1))
    ]
    x, weight = (each.detach().double().requires_grad_() for each in inputs)
    wanted = x * (x.pow(2).mean(-1, keepdim=True) + 1e-2).rsqrt() * weight
    result = at.operator(*inputs, 1e-2)
    assert result.dtype is at.dtype
    torch.testing.assert_close(result.double(), wanted, **at.tolerances)
    outer = draw(tokens, HIDDEN, seed=2).to(at.device)
    found = torch.autograd.grad(result, inputs, outer.to(at.dtype))
    for gradient, right in zip(found, torch.autograd.grad(wanted, (x, weight), outer.double()), strict=True):
        assert gradient.shape == right.shape
        torch.testing.assert_close(gradient.double(), right, **at.tolerances)


@backends("rms_norm")
@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_rms_norm_divides_by_the_root_and_gives_both_gradients(kernel: Kernel, tokens: int) -> None:
    check_rms_norm(here(kernel, FACTS), tokens)


# Cross-entropy; with the vocabulary split it is tested in test_cross_entropy.py.


@backends("cross_entropy")
def test_cross_entropy_is_an_fp32_sum_over_targets_that_count(kernel: Kernel) -> None:
    at = here(kernel, FACTS)
    logits = draw(11, 97).to(at.device, at.dtype).requires_grad_()
    targets = torch.arange(11, device=at.device)
    targets[4:6] = IGNORE
    exact = logits.detach().double().requires_grad_()
    wanted = -exact.log_softmax(-1)[targets != IGNORE].gather(1, targets[targets != IGNORE][:, None]).sum()
    result = at.operator(logits, targets, 0, None)
    assert result.dtype is torch.float32
    torch.testing.assert_close(result.double(), wanted, **at.tolerances)
    (found,), (right,) = torch.autograd.grad(result, logits), torch.autograd.grad(wanted, exact)
    torch.testing.assert_close(found.double(), right, **at.tolerances)


# Adam.


def check_adam(at: Here, weight_decay: float) -> None:
    sizes, divisor, beta1, beta2, eps = (5, 12), 7.0, 0.8, 0.95, 1e-2
    parameters = [draw(size, seed=size).to(at.device) for size in sizes]
    moments = [[torch.zeros_like(p) for p in parameters] for _ in range(2)]
    exact = [(p.double(), torch.zeros_like(p).double(), torch.zeros_like(p).double()) for p in parameters]
    for step in (1, 2, 3):
        lr = 0.1 / step
        gradients = [draw(size, seed=100 * step + size).to(at.device) for size in sizes]
        for n, gradient in enumerate(gradients):
            p, m, v = exact[n]
            m, v = (b * x + (1 - b) * gradient.double() ** e for b, x, e in ((beta1, m, 1), (beta2, v, 2)))
            root = (v / (1 - beta2**step)).sqrt() + eps
            exact[n] = (p * (1 - lr * weight_decay) - lr * (m / (1 - beta1**step)) / root, m, v)
        at.operator(
            parameters,
            [gradient * divisor for gradient in gradients],
            *moments,
            step=step,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            divisor=divisor,
        )
    for found, right in zip(zip(parameters, *moments, strict=True), exact, strict=True):
        for tensor, wanted in zip(found, right, strict=True):
            torch.testing.assert_close(tensor.double(), wanted, rtol=1e-5, atol=1e-6)


@backends("adam")
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_takes_three_steps_with_decoupled_decay_from_divided_gradients(
    kernel: Kernel, weight_decay: float
) -> None:
    check_adam(here(kernel, FACTS), weight_decay)


# The code around libraries that are not here.


def by_name(op: str, name: str) -> Kernel:
    return next(kernel for kernel in KERNELS if (kernel.op, kernel.name) == (op, name))


def stand_in(monkeypatch: pytest.MonkeyPatch, module: str, **contents: Any) -> None:
    """Put a module under this name, its parents too."""
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        made = ModuleType(name)
        made.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, made)
    for key, value in contents.items():
        setattr(sys.modules[module], key, value)


def loaded(op: str, name: str) -> Here:
    return Here(by_name(op, name).load(), torch.device("cpu"), torch.float32)


def check_borders(cu_seqlens: Tensor, longest: int) -> list[int]:
    """What a packed kernel is told of the documents: int32, none of them empty."""
    borders: list[int] = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(borders)]
    assert cu_seqlens.dtype is torch.int32
    assert borders[0] == 0
    assert min(lengths) > 0
    assert longest == max(lengths)
    return borders


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    assert (cu_seqlens_q.tolist(), max_seqlen_q) == (cu_seqlens_k.tolist(), max_seqlen_k)
    assert (dropout_p, softmax_scale, causal, window_size) == (0.0, None, True, (-1, -1))
    return masked_softmax(q, k, v, check_borders(cu_seqlens_q, max_seqlen_q))


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    assert (cu_seq_q.tolist(), max_q) == (cu_seq_k.tolist(), max_k)
    assert (scale, window_size, enable_gqa) == (None, (-1, 0), query.shape[1] != key.shape[1])
    return masked_softmax(query, key, value, check_borders(cu_seq_q, max_q))


class DotProductAttention:
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
    ) -> None:
        assert (qkv_format, attn_mask_type, attention_dropout) == ("thd", "padding_causal", 0.0)
        self.sizes = (num_attention_heads, num_gqa_groups, kv_channels)

    def __call__(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
    ) -> Tensor:
        assert self.sizes == (query_layer.shape[1], key_layer.shape[1], query_layer.shape[2])
        assert (cu_seqlens_q.tolist(), max_seqlen_q) == (cu_seqlens_kv.tolist(), max_seqlen_kv)
        borders = check_borders(cu_seqlens_q, max_seqlen_q)
        return masked_softmax(query_layer, key_layer, value_layer, borders).flatten(1)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(
    ("name", "module", "contents"),
    [
        ("flash-attn", "flash_attn", {"flash_attn_varlen_func": flash_attn_varlen_func}),
        ("torch-varlen", "torch.nn.attention.varlen", {"varlen_attn": varlen_attn}),
        ("transformer-engine", "transformer_engine.pytorch", {"DotProductAttention": DotProductAttention}),
    ],
    ids=["flash-attn", "torch-varlen", "transformer-engine"],
)
def test_packed_attention_kernels_are_called_as_their_libraries_document(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    module: str,
    contents: dict[str, Callable[..., Any]],
    lengths: tuple[int, ...],
    kv_heads: int,
) -> None:
    if module.startswith("torch."):
        monkeypatch.setattr(f"{module}.varlen_attn", varlen_attn)
    else:
        stand_in(monkeypatch, module, **contents)
    at = loaded("attention", name)
    check_attention(at, lengths, kv_heads)
    assert attended(at, qkv(at, 0), (0,)).shape == (0, HEADS, HEAD_DIM)


def test_transformer_engines_norm_kernels_are_called_as_its_own_module_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(
        x: Tensor,
        w: Tensor,
        eps: float,
        out: None,
        quantizer: None,
        dtype: str,
        sm_margin: int,
        centred: bool,
    ) -> tuple[Tensor, None, Tensor]:
        assert (out, quantizer, dtype, sm_margin, centred) == (None, None, "kFloat32", 0, False)
        inverse = (x.pow(2).mean(-1) + eps).rsqrt()
        return x * inverse[:, None] * w, None, inverse

    def backward(
        dz: Tensor, x: Tensor, rsigma: Tensor, w: Tensor, sm_margin: int, centred: bool
    ) -> tuple[Tensor, Tensor]:
        assert (sm_margin, centred) == (0, False)
        unit = x * rsigma[:, None]
        inner = dz * w
        dx = (inner - unit * (inner * unit).mean(-1, keepdim=True)) * rsigma[:, None]
        return dx, (dz * unit).sum(0)

    stand_in(monkeypatch, "transformer_engine.pytorch.constants", TE_DType={torch.float32: "kFloat32"})
    stand_in(monkeypatch, "transformer_engine_torch", rmsnorm_fwd=forward, rmsnorm_bwd=backward)
    check_rms_norm(loaded("rms_norm", "transformer-engine"), 7)


def test_apexs_norm_is_called_with_its_own_order_of_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused_rms_norm_affine(
        input: Tensor,
        weight: Tensor,
        normalized_shape: Any,
        eps: float = 1e-6,
        memory_efficient: bool = False,
    ) -> Tensor:
        assert list(normalized_shape) == [HIDDEN]
        return torch.nn.functional.rms_norm(input, normalized_shape, weight, eps)

    stand_in(monkeypatch, "apex.normalization.fused_layer_norm", fused_rms_norm_affine=fused_rms_norm_affine)
    check_rms_norm(loaded("rms_norm", "apex"), 7)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("longest", [2**30, 5], ids=["whole", "in pieces"])
@pytest.mark.parametrize(
    ("name", "module"), [("apex", "amp_C"), ("transformer-engine", "transformer_engine.pytorch.optimizers")]
)
def test_the_shared_adam_kernel_is_called_with_its_c_signature(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, longest: int, weight_decay: float
) -> None:
    def multi_tensor_adam(
        chunk_size: int,
        noop_flag: Tensor,
        tensor_lists: list[list[Tensor]],
        lr: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        step: int,
        mode: int,
        bias_correction: int,
        weight_decay: float,
    ) -> None:
        assert (chunk_size, noop_flag.dtype, noop_flag.tolist()) == (65536, torch.int32, [0])
        assert (mode, bias_correction) == (1, 1)
        assert all(len(tensors) == len(tensor_lists[0]) for tensors in tensor_lists)
        for g, p, m, v in zip(*tensor_lists, strict=True):
            assert g.numel() <= longest
            m.mul_(beta1).add_(g, alpha=1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            root = (v / (1 - beta2**step)).sqrt() + epsilon
            p.sub_(lr * (m / (1 - beta1**step) / root + weight_decay * p))

    monkeypatch.setattr(multi_tensor_module, "MOST_ELEMENTS", longest)
    stand_in(monkeypatch, module, multi_tensor_adam=multi_tensor_adam)
    check_adam(loaded("adam", name), weight_decay)
