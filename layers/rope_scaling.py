"""Rotary frequencies stretched for longer contexts: linear, and Llama 3.1's by wavelength.

The formulas are those of Hugging Face transformers (`modeling_rope_utils`), in FP32 like theirs.
"""

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from hetero_megatron.errors import ModelError

LLAMA3_FIELDS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are changed.

    `linear` divides all of them by `factor`. `llama3` divides those whose wavelength exceeds
    original_max_position_embeddings / low_freq_factor tokens, keeps those below original / high_freq_factor, and blends
    in between.

    Raises:
        ModelError: an unknown type, or a number that is missing, out of range or not used by the type.
    """

    rope_type: str
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in ("linear", "llama3"):
            raise ModelError(
                f"rope_scaling: rope_type {self.rope_type!r} is not built; known: linear, llama3 (and none)"
            )
        wanted = ("factor", *LLAMA3_FIELDS) if self.rope_type == "llama3" else ("factor",)
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name in wanted and (not _is_number(value) or value <= 0):
                missing = "is missing" if value is None else f"is {value!r}; it must be a positive number"
                raise ModelError(f"rope_scaling: {field.name} of rope_type {self.rope_type} {missing}")
            if field.name not in wanted and value is not None:
                raise ModelError(f"rope_scaling: rope_type {self.rope_type} has no {field.name}; drop it")
        if self.rope_type == "llama3" and self._high <= self._low:
            raise ModelError(
                f"rope_scaling: high_freq_factor {self._high:g} must exceed low_freq_factor {self._low:g}"
            )

    @property
    def _low(self) -> float:
        return self.low_freq_factor or 0.0

    @property
    def _high(self) -> float:
        return self.high_freq_factor or 0.0

    def scaled(self, frequencies: Tensor) -> Tensor:
        """The changed frequencies, in radians per token."""
        slow = frequencies / self.factor
        if self.rope_type == "linear":
            return slow
        length = self.original_max_position_embeddings or 0
        wavelengths = 2 * math.pi / frequencies
        blend = (length / wavelengths - self._low) / (self._high - self._low)
        between = (1 - blend) * slow + blend * frequencies
        found = torch.where(wavelengths > length / self._low, slow, between)
        return torch.where(wavelengths < length / self._high, frequencies, found)

    @classmethod
    def read(cls, value: object) -> "RopeScaling":
        """From a mapping as a config.json or a recipe has it; `type` is the old name of `rope_type`.

        Raises:
            ModelError: it is no mapping, a key is unknown, or the two names contradict each other.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise ModelError(f"rope_scaling: {value!r} is no mapping; write rope_type and factor")
        given = dict(value)
        old = given.pop("type", None)
        kind = given.pop("rope_type", old)
        if kind is None:
            raise ModelError(f"rope_scaling: rope_type is missing beside {sorted(given)}")
        if old is not None and old != kind:
            raise ModelError(f"rope_scaling: rope_type {kind!r} and type {old!r} contradict each other")
        names = [field.name for field in fields(cls)]
        for key in given:
            # A type that is not built is refused by its name, not by what only it has.
            if key not in names and kind in ("linear", "llama3"):
                raise ModelError(f"rope_scaling: unknown key {key!r}; known: {', '.join(names)}")
        return cls(str(kind), **{"factor": None, **{key: given[key] for key in given if key in names}})


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device | str = "cpu"
) -> Tensor:
    """[head_dim / 2] radians per token, FP32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / theta**exponents
    return frequencies if scaling is None else scaling.scaled(frequencies)
