"""First values of parameters from seed, name and global index alone, so no layout changes them (paper §7).

A 64-bit hash of the element's global index (splitmix64) gives two uniform numbers, and Box-Muller turns them
into one normal number. Only sums, products, quotients and square roots of FP32 are used, which IEEE 754
rounds in one way: a shard, a vector lane and a GPU give the same bits. A library's log does not promise that.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from hetero_megatron.errors import LayerError

Initial = tuple[Literal["normal"], float] | tuple[Literal["ones", "zeros"]]
Bounds = tuple[tuple[int, int], ...]

# Elements made at once: temporaries of a chunk stay in a CPU's cache, and fill a GPU.
_CPU_CHUNK, _GPU_CHUNK = 1 << 15, 1 << 23
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def initial_values(model: nn.Module) -> dict[str, Initial]:
    """How each parameter of `model` starts, by full name (`layers.3.wq.weight`)."""
    values: dict[str, Initial] = {}
    for module_name, module in model.named_modules():
        declared: Mapping[str, Initial] = module.initial() if hasattr(module, "initial") else {}
        values.update({f"{module_name}.{parameter}": spec for parameter, spec in declared.items()})
    return values


def initial_value(
    name: str,
    spec: Initial,
    bounds: Bounds,
    full_shape: tuple[int, ...],
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The part within `bounds` (global [lo, hi) per dim) of parameter `name` of global shape `full_shape`.

    Values are made in FP32 and rounded to `dtype`, so a BF16 start is the rounded FP32 start.

    Raises:
        LayerError: bounds outside the shape, or an unknown kind of start.
    """
    inside = (0 <= lo <= hi <= size for (lo, hi), size in zip(bounds, full_shape, strict=False))
    if len(bounds) != len(full_shape) or not all(inside):
        raise LayerError(f"{name}: bounds {bounds} lie outside the shape {full_shape}")
    local_shape = [hi - lo for lo, hi in bounds]
    if spec[0] == "ones":
        return torch.ones(local_shape, dtype=dtype, device=device)
    if spec[0] == "zeros":
        return torch.zeros(local_shape, dtype=dtype, device=device)
    if spec[0] != "normal":
        raise LayerError(f"{name}: start {spec[0]!r} is unknown; known: 'normal', 'ones', 'zeros'")
    value = torch.empty(local_shape, dtype=dtype, device=device)
    key = int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")
    rows_at, columns = _rows(bounds, full_shape)
    flat = value.view(rows_at.numel(), len(columns))
    chunk = _CPU_CHUNK if value.device.type == "cpu" else _GPU_CHUNK
    for rows, cols in _chunks(rows_at.numel(), len(columns), chunk):
        at = torch.arange(columns[cols].start, columns[cols].stop, device=device)
        index = rows_at[rows].to(device)[:, None] + at
        flat[rows, cols] = _normal(_splitmix64(index, key)).mul_(spec[1])
    return value


def _rows(bounds: Bounds, full_shape: tuple[int, ...]) -> tuple[Tensor, range]:
    """Global flat index of the start of every local row (all dims but the last), and the columns of a row."""
    starts = torch.zeros(1, dtype=torch.int64)
    for (lo, hi), size in zip(bounds[:-1], full_shape[:-1], strict=True):
        starts = (starts[:, None] * size + torch.arange(lo, hi)).flatten()
    lo, hi = bounds[-1]
    return starts * full_shape[-1], range(lo, hi)


def _chunks(rows: int, columns: int, elements: int) -> Iterator[tuple[slice, slice]]:
    """Slices of at most `elements` that tile [rows, columns]."""
    width = max(1, min(columns, elements))
    height = elements // width
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            yield slice(row, min(row + height, rows)), slice(column, min(column + width, columns))


def _signed(bits: int) -> int:
    """The int64 with these 64 bits: torch multiplies int64 modulo 2^64, which is what the hash needs."""
    bits &= (1 << 64) - 1
    return bits - (1 << 64) if bits >> 63 else bits


def _shift_xor(hashed: Tensor, places: int) -> Tensor:
    """`hashed ^= hashed >>> places`, the sign bit not smeared."""
    shifted = torch.bitwise_right_shift(hashed, places).bitwise_and_((1 << (64 - places)) - 1)
    return hashed.bitwise_xor_(shifted)


def _splitmix64(index: Tensor, key: int) -> Tensor:
    """64 random bits per index (Steele et al. 2014); overwrites `index`."""
    hashed = index.add_(1).mul_(_signed(_GAMMA)).add_(_signed(key))
    hashed = _shift_xor(hashed, 30).mul_(_signed(_MIX_1))
    hashed = _shift_xor(hashed, 27).mul_(_signed(_MIX_2))
    return _shift_xor(hashed, 31)


def _normal(hashed: Tensor) -> Tensor:
    """Box-Muller, the cosine half: the radius from the upper 32 bits, the angle from the lower 24."""
    upper = torch.bitwise_right_shift(hashed, 32).bitwise_and_(0xFFFFFFFF)
    radius = _negative_log(upper.to(torch.float32).add_(0.5).mul_(2.0**-32)).mul_(2.0).sqrt_()
    angle = hashed.bitwise_and_(0xFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-24)
    return radius.mul_(_cos_turns(angle))


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Horner's rule, highest power first, every product and sum rounded by itself."""
    result = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result.mul_(x).add_(coefficient)
    return result


def _negative_log(x: Tensor) -> Tensor:
    """-ln x for FP32 x in (0, 1]: exponent and mantissa m apart, ln m = 2 artanh((m - 1) / (m + 1))."""
    bits = x.view(torch.int32)
    # bits(1) - bits(sqrt(1/2)) more carries into the exponent just when the mantissa exceeds sqrt(2).
    exponent = torch.bitwise_right_shift(bits + (0x3F800000 - 0x3F3504F3), 23).sub_(127)
    mantissa = (bits - torch.bitwise_left_shift(exponent, 23)).view(torch.float32)
    ratio = (mantissa - 1.0).div_(mantissa + 1.0)
    series = _polynomial(ratio * ratio, (2 / 9, 2 / 7, 2 / 5, 2 / 3, 2.0))
    return exponent.to(torch.float32).mul_(-math.log(2.0)).sub_(series.mul_(ratio))


_HALF_TURN_COSINE = tuple((-1) ** n * math.pi ** (2 * n) / math.factorial(2 * n) for n in range(7, -1, -1))


def _cos_turns(turns: Tensor) -> Tensor:
    """cos(2 pi u) for u in [0, 1): the series of c = cos(pi (u - 1/2)), |angle| <= pi/2, then 1 - 2 c^2."""
    centred = turns.sub_(0.5)
    half = _polynomial(centred * centred, _HALF_TURN_COSINE)
    # cos(2 pi u) = -cos(2 pi (u - 1/2)) = 1 - 2 cos^2(pi (u - 1/2)).
    return half.mul_(half).mul_(-2.0).add_(1.0)
