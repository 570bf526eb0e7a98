"""The update against torch.optim."""

import pytest
import torch
from torch import Tensor

from hetero_megatron.annotation import Annotation
from hetero_megatron.comm import resolve
from hetero_megatron.runtime.optimizer import (
    OptimizerSettings,
    clip_factor,
    squared_norm,
    update,
)
from hetero_megatron.runtime.state import Placement, State, lay_out, view
from tests.runtime.flat import refresh, state_of


def test_the_stabiliser_is_added_once_to_the_global_norm() -> None:
    assert clip_factor(3e-6, 1e-6) == pytest.approx(0.25, abs=1e-9)
    assert clip_factor(208.0769, 1.0) == pytest.approx(1 / 208.0769, rel=1e-6)


@pytest.mark.parametrize(("norm", "limit"), [(0.5, 1.0), (0.0, 1.0), (7.0, None), (7.0, 0.0)])
def test_small_gradients_and_no_limit_are_not_scaled(norm: float, limit: float | None) -> None:
    assert clip_factor(norm, limit) == 1.0


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_adam_is_torchs_adamw_with_norm_weights_spared_from_decay(decay: float, dtype: torch.dtype) -> None:
    state = state_of(dtype=dtype)
    wanted = copies(state)
    groups = [
        {"params": [p for p in wanted.values() if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in wanted.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-4)
    settings = OptimizerSettings(beta1=0.8, beta2=0.95, eps=1e-4, weight_decay=decay)
    for step in range(5):
        lr = 1e-2 * (step + 1)
        fill_gradients(state, wanted, step, divisor=7.0 + step)
        update(state, settings, lr, divisor=7.0 + step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    refresh(state)
    assert state.step == 5
    for slot in state.slots:
        parameter = wanted[slot.name]
        torch.testing.assert_close(view(state.master, slot), parameter.detach())
        assert torch.equal(state.parameters[slot.name], view(state.master, slot).to(dtype))
        for moment, flat in state.moments.items():
            torch.testing.assert_close(view(flat, slot), optimizer.state[parameter][moment])


@pytest.mark.parametrize("name", ["adam", "sgd"])
@pytest.mark.parametrize("length", [1, 15, 16, 29, 4099])
def test_an_element_is_updated_alike_wherever_it_lies(name: str, length: int) -> None:
    """Copies of a parameter lie at other places of flat buffers of other lengths, and must stay bit-equal."""
    torch.manual_seed(length)
    flats = [torch.randn(length) * scale for scale in (2e-2, 1e-3, 1e-3)] + [torch.rand(length) * 1e-6]

    def updated(before: int, behind: int) -> list[Tensor]:
        own = [torch.cat([torch.ones(before), flat, torch.ones(behind)]) for flat in flats]
        state = state_of()
        state.master, state.gradient, state.moments = (
            own[0],
            own[1],
            {"exp_avg": own[2], "exp_avg_sq": own[3]},
        )
        for step in range(3):
            state.gradient = own[1] * (step + 1)
            update(state, OptimizerSettings(name=name, eps=1e-4), 1e-3, divisor=7.0)
        return [flat[before : before + length] for flat in (state.master, *state.moments.values())]

    alone = updated(0, 0)
    for before, behind in ((0, 1), (3, 0), (13, 40), (16, 7)):
        for flat, wanted in zip(updated(before, behind), alone, strict=True):
            assert torch.equal(flat, wanted), f"{before} elements before, {behind} behind"


def test_sgd_without_decay_is_torchs() -> None:
    state = state_of()
    wanted = copies(state)
    optimizer = torch.optim.SGD(wanted.values(), lr=0.3)
    for step in range(3):
        fill_gradients(state, wanted, step, divisor=5.0)
        update(state, OptimizerSettings(name="sgd"), 0.3, divisor=5.0)
        optimizer.step()
    for slot in state.slots:
        torch.testing.assert_close(view(state.master, slot), wanted[slot.name].detach())


def test_sgd_decays_apart_from_the_gradient_and_spares_norm_weights() -> None:
    state = state_of()
    wanted = copies(state)
    fill_gradients(state, wanted, seed=0, divisor=5.0)
    update(state, OptimizerSettings(name="sgd", weight_decay=0.1), 0.3, divisor=5.0)
    for slot in state.slots:
        parameter = wanted[slot.name].detach()
        kept = 1.0 if parameter.dim() == 1 else 1 - 0.3 * 0.1
        torch.testing.assert_close(view(state.master, slot), kept * parameter - 0.3 * wanted[slot.name].grad)


def copies(state: State) -> dict[str, Tensor]:
    """The parameters by name, for torch.optim."""
    return {slot.name: view(state.master, slot).clone().requires_grad_() for slot in state.slots}


def fill_gradients(state: State, wanted: dict[str, Tensor], seed: int, divisor: float) -> None:
    """Random gradients into `wanted`, and `divisor` times as large ones into the state."""
    generator = torch.Generator().manual_seed(seed)
    for slot in state.slots:
        wanted[slot.name].grad = gradient = torch.randn(slot.shape, generator=generator)
        view(state.gradient, slot).copy_(gradient * divisor)


def test_a_rank_without_parameters_updates_nothing_and_has_norm_0() -> None:
    empty = State((), torch.float32, torch.device("cpu"))
    for name in ("adam", "sgd"):
        update(empty, OptimizerSettings(name=name, weight_decay=0.1), 1e-3, 1.0)
    assert empty.step == 2
    assert squared_norm(empty) == 0.0


def test_only_norm_weights_or_only_matrices_make_one_decay_group() -> None:
    for shapes in ({"norm.weight": (3,)}, {"a.weight": (3, 2)}):
        state = state_of(shapes)
        before = state.master.clone()
        update(state, OptimizerSettings(weight_decay=0.5), 1e-1, 1.0)
        kept = 1.0 if "norm.weight" in shapes else 0.95
        torch.testing.assert_close(state.master, before * kept)


def test_the_norm_counts_only_what_this_rank_counts_and_shows_what_is_not_finite() -> None:
    copies = Annotation.on((0, 1), {-1: 2})
    rows = Annotation.on((0, 1), {0: 2})
    parameters = [
        Placement("norm.weight", (3,), copies, copies, resolve(copies, copies), resolve(copies, copies)),
        Placement("a.weight", (4, 2), rows, rows, resolve(rows, rows), resolve(rows, rows)),
    ]
    squares = []
    for rank in (0, 1):
        state = State(lay_out(rank, parameters), torch.float32, torch.device("cpu"))
        state.gradient.fill_(2.0)
        squares.append(squared_norm(state).item())
    assert squares == pytest.approx([4.0 * (3 + 4), 4.0 * 4])
    assert squared_norm(state).dtype == torch.float64
    state.gradient[0] = float("nan")
    assert not torch.isfinite(squared_norm(state)), "a copy that another rank counts is not finite either"
