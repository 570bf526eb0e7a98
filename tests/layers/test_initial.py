"""First values depend on seed, name and global index, and on nothing else."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from hetero_megatron.errors import LayerError
from hetero_megatron.layers import Linear, RMSNorm, initial_value, initial_values

NORMAL = ("normal", 1.0)
PINNED = [1058007986, 1044478076, 1051700314, -1072679350]  # bits of 0.5622, 0.1889, 0.3431, -2.2533


def _whole(shape: tuple[int, ...], name: str = "layers.0.wq.weight", seed: int = 7) -> Tensor:
    return initial_value(name, NORMAL, tuple((0, size) for size in shape), shape, seed)


def test_values_have_the_moments_tails_and_distribution_of_a_normal() -> None:
    values = _whole((1000, 1000)).flatten().double()
    n = values.numel()
    assert abs(values.mean()) < 4 / math.sqrt(n)
    assert abs(values.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs(values.pow(3).mean()) < 4 * math.sqrt(15 / n)
    assert abs(values.pow(4).mean() - 3) < 4 * math.sqrt(96 / n)
    assert 4.3 < values.abs().max() < 6.8
    cumulative = torch.special.ndtr(values.sort().values)
    assert (cumulative - (torch.arange(n) + 0.5) / n).abs().max() < 1.63 / math.sqrt(n)


def test_neighbours_in_a_row_and_in_a_column_are_independent() -> None:
    values = _whole((1000, 1000)).double()
    for a, b in ((values[:, 1:], values[:, :-1]), (values[1:], values[:-1])):
        assert abs((a * b).mean()) < 4 / 1000
        assert abs((a.abs() * b.abs()).mean() - 2 / math.pi) < 4 / 1000


@pytest.mark.parametrize("shape", [(96, 32), (97, 33), (5, 70_001), (7,), (3, 4, 5)])
def test_every_shard_is_a_slice_of_the_whole_bit_for_bit(shape: tuple[int, ...]) -> None:
    whole = _whole(shape)
    for dim, size in enumerate(shape):
        for parts in (2, 3, 4):
            edges = [math.ceil(Fraction(size * i, parts)) for i in range(parts + 1)]
            for lo, hi in itertools.pairwise(edges):
                bounds = tuple((lo, hi) if d == dim else (0, n) for d, n in enumerate(shape))
                shard = initial_value("layers.0.wq.weight", NORMAL, bounds, shape, 7)
                assert torch.equal(shard, whole.narrow(dim, lo, hi - lo))


def test_names_seeds_and_halves_give_different_values() -> None:
    values = [_whole((8, 8), f"layers.{i}.wq.weight") for i in range(4)]
    values += [_whole((8, 8), "layers.0.wk.weight"), _whole((8, 8), seed=8)]
    for i, a in enumerate(values):
        assert not torch.equal(a[:4], a[4:])
        assert not torch.equal(a[:, :4], a[:, 4:])
        assert all((a != b).all() for b in values[:i])


def test_these_values_never_change_between_versions_and_machines() -> None:
    assert _whole((2, 2)).view(torch.int32).flatten().tolist() == PINNED


def test_the_arithmetic_agrees_with_log_and_cos() -> None:
    from hetero_megatron.layers.initial import _cos_turns, _negative_log

    u = torch.rand(100_000, generator=torch.Generator().manual_seed(0)).clamp_(min=2.0**-33)
    torch.testing.assert_close(_negative_log(u.clone()).double(), -u.double().log(), rtol=1e-6, atol=1e-7)
    turns = torch.cos(2 * math.pi * u.double())
    torch.testing.assert_close(_cos_turns(u.clone()).double(), turns, rtol=0.0, atol=1e-6)


def test_a_bf16_start_is_the_rounded_fp32_start_and_std_scales() -> None:
    bounds, shape = ((0, 6), (0, 5)), (6, 5)
    fp32 = initial_value("w", ("normal", 0.02), bounds, shape, 1)
    assert torch.equal(
        initial_value("w", ("normal", 0.02), bounds, shape, 1, torch.bfloat16), fp32.bfloat16()
    )
    torch.testing.assert_close(fp32, initial_value("w", NORMAL, bounds, shape, 1) * 0.02)
    assert torch.equal(initial_value("w", ("ones",), ((2, 5),), (8,), 1), torch.ones(3))
    assert torch.equal(initial_value("w", ("zeros",), ((2, 5),), (8,), 1), torch.zeros(3))


def test_empty_shards_are_empty() -> None:
    assert initial_value("w", NORMAL, ((3, 3), (0, 5)), (8, 5), 1).shape == (0, 5)
    assert initial_value("w", NORMAL, ((0, 3), (5, 5)), (8, 5), 1).shape == (3, 0)


def test_starts_are_collected_by_full_parameter_name() -> None:
    model = torch.nn.ModuleDict({"a": Linear(2, 3, 0.5), "b": RMSNorm(2, 1e-5)})
    assert initial_values(model) == {"a.weight": ("normal", 0.5), "b.weight": ("ones",)}


def test_bounds_outside_the_shape_and_unknown_starts_are_refused() -> None:
    with pytest.raises(LayerError, match=r"w: bounds \(\(0, 9\),\) lie outside the shape \(8,\)"):
        initial_value("w", NORMAL, ((0, 9),), (8,), 0)
    with pytest.raises(LayerError, match="w: start 'twos' is unknown; known: 'normal', 'ones', 'zeros'"):
        initial_value("w", ("twos",), ((0, 8),), (8,), 0)  # type: ignore[arg-type]  # the point of the test
