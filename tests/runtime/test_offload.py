"""Activations leave the device between F and B and come back unchanged; here the host is another buffer."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetero_megatron.models.llama import build_single_device
from hetero_megatron.recompute import recomputed_runs
from hetero_megatron.runtime import offload
from hetero_megatron.runtime.batch import MicroBatch
from hetero_megatron.runtime.offload import HostBuffers, Offload
from hetero_megatron.runtime.recompute import generate_recomputed
from hetero_megatron.runtime.stage import StageRun
from tests.distributed.training import build, stage, strategy
from tests.runtime.live import Live
from tests.runtime.test_recompute import M0, batch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_tensors_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALLEST_OFFLOADED", 1024)


def model_run(model: nn.Module, offloaded: Offload | None, kind: str = "none") -> StageRun:
    program = build(model, strategy((1, 1, [stage("0", "0-3")])))  # type: ignore[arg-type]
    (chunk,) = program.executable(0).chunks
    runs = recomputed_runs(chunk.nodes, lambda layer: kind)
    code, inputs = generate_recomputed(chunk.nodes, (), (), dict(model.named_modules()), {}, runs)
    return StageRun(code, inputs, True, offloaded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_gradients_are_bit_equal_with_and_without_offload(kind: str, dtype: torch.dtype) -> None:
    model = build_single_device(M0, 7, dtype)
    data = [batch(256), batch(128)]
    gradients = []
    for offloaded in (None, Offload(CPU)):
        model.zero_grad()
        run = model_run(model, offloaded, kind)
        for number, each in enumerate(data):
            run.forward(number, each, {})
        for number in (1, 0):
            run.backward(number, [])
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        if offloaded is not None:
            assert offloaded.buffers.free_bytes > 0, "something was moved, and its host memory is free again"
    assert all(map(torch.equal, *gradients))


def device_bytes(offloaded: Offload | None, kind: str, data: MicroBatch) -> tuple[int, int]:
    """Bytes alive between F and B on the device, and bytes in host buffers."""
    run = model_run(build_single_device(M0, 7), offloaded, kind)
    with Live() as live:
        run.forward(0, data, {})
    trip = run._saved[0].trip
    host = {each._host.untyped_storage()._cdata for each in trip.moved} if trip else set()
    moved = sum(size for cdata, (_, size) in live._made.items() if cdata in host)
    return live.bytes - moved, moved


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_what_autograd_keeps_is_not_on_the_device_between_forward_and_backward(kind: str) -> None:
    before, _ = device_bytes(None, kind, batch())
    after, host = device_bytes(Offload(CPU), kind, batch())
    assert host >= 0.95 * before
    assert after <= 0.05 * before, "what is small, and the angles that all layers share, stay"


class Doubles(nn.Module):
    """Saves views of one storage three times, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0
        return ((y @ self.weight) * y.t() * y[:, :1]).sum()


def saved(module: nn.Module, x: Tensor) -> tuple[Any, Tensor, Offload]:
    mover = Offload(CPU)
    with mover.forward(module.parameters()) as trip:
        out = module(x)
    return trip, out, mover


def test_views_of_one_storage_move_once_and_parameters_stay() -> None:
    module, x = Doubles(), torch.randn(32, 32, requires_grad=True)
    trip, out, _ = saved(module, x)
    # y once, y @ w * y.t() and y @ w: three storages, though y is saved as itself, transposed and sliced.
    assert [each._size for each in trip.moved] == [4096, 4096, 4096]
    assert max(each.users for each in trip.moved) >= 3
    assert trip.moved_bytes == 3 * 4096
    out.backward()
    found = x.grad, module.weight.grad
    x.grad = module.weight.grad = None
    module(x).backward()
    assert all(map(torch.equal, found, (x.grad, module.weight.grad)))  # type: ignore[arg-type]


def test_a_storage_is_on_the_device_from_its_first_use_to_its_last() -> None:
    module, x = Doubles(), torch.randn(32, 32, requires_grad=True)
    trip, out, mover = saved(module, x)
    assert all(each._back is None for each in trip.moved)
    trip.start_back()
    assert all(each._back is not None for each in trip.moved), "all three are less than what is fetched ahead"
    out.backward()
    assert all(each._back is None for each in trip.moved)
    assert mover.buffers.free_bytes == 0, "the trip still holds its host memory"
    del trip, out
    gc.collect()
    assert mover.buffers.free_bytes == 3 * 4096


def test_only_a_few_storages_come_back_ahead_of_the_backward() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    mover = Offload(CPU)
    with mover.forward(()) as trip:
        y = x
        for _ in range(12):
            y = y.exp().sin()
    trip.start_back()
    fetched = [each._back is not None for each in trip.moved]
    assert sum(fetched) == offload.FETCHED_AHEAD
    assert all(fetched[-offload.FETCHED_AHEAD :])


def test_a_tensor_written_to_after_it_was_saved_is_another_one() -> None:
    """Autograd would refuse the old version; the moved copy has it."""
    x = torch.randn(64, 64, requires_grad=True)
    mover = Offload(CPU)
    with mover.forward(()) as trip:
        y = x * 2.0
        a = y.sin()
        y.mul_(3.0)
        b = y.cos()
    assert len(trip.moved) == 2
    (a.sum() + b.sum()).backward()
    wanted = x.detach().mul(2.0).cos().mul(2.0) - x.detach().mul(6.0).sin().mul(6.0)
    torch.testing.assert_close(x.grad, wanted)


def test_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALLEST_OFFLOADED", 4097)
    trip, out, _ = saved(Doubles(), torch.randn(32, 32, requires_grad=True))
    assert trip.moved == []
    out.backward()


def test_host_buffers_are_used_again_when_they_fit_and_are_not_twice_too_large() -> None:
    buffers = HostBuffers(pinned=False)
    first, _ = buffers.take(1000)
    second, _ = buffers.take(400)
    buffers.give(first, None)
    buffers.give(second, None)
    assert buffers.free_bytes == 1400
    again, _ = buffers.take(300)
    assert again is second
    other, _ = buffers.take(501)
    assert other is first
    buffers.give(first, None)
    assert buffers.take(500)[0] is not first


def test_a_saved_tensor_may_be_asked_for_twice() -> None:
    x = torch.randn(32, 32, requires_grad=True)
    mover = Offload(CPU)
    with mover.forward(()):
        y = (x * 1.0).exp().sum()
    y.backward(retain_graph=True)
    once = x.grad.clone()  # type: ignore[union-attr]
    y.backward()
    torch.testing.assert_close(x.grad, 2 * once)
