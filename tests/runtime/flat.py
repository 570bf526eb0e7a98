"""Small States for tests of what works on flat buffers."""

from types import SimpleNamespace
from typing import cast

import torch

from hetero_megatron.annotation import Annotation
from hetero_megatron.comm import resolve
from hetero_megatron.runtime.state import Placement, State, lay_out
from hetero_megatron.runtime.sync import ParameterGather
from hetero_megatron.runtime.world import Groups, World

SHAPES = {"a.weight": (4, 3), "norm.weight": (5,), "b.weight": (2, 6)}


def state_of(shapes: dict[str, tuple[int, ...]] | None = None, dtype: torch.dtype = torch.float32) -> State:
    """Whole parameters on rank 0, filled with numbers that differ everywhere."""
    here = Annotation.on((0,))
    plan = resolve(here, here)
    parameters = [
        Placement(name, shape, here, here, plan, plan) for name, shape in (shapes or SHAPES).items()
    ]
    state = State(lay_out(0, parameters), dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    state.initialise(lambda slot: torch.randn(slot.shape, generator=generator))
    refresh(state)
    return state


def refresh(state: State) -> None:
    """Make the parameters from the master weights, as a Session of one rank does."""
    alone = cast(World, SimpleNamespace(rank=0, device=torch.device("cpu")))
    ParameterGather(state, alone, cast(Groups, None), {}).start()
