"""Which kernel is chosen, and in which words another one is refused."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from hetero_megatron.errors import LayerError
from hetero_megatron.layers.kernels import KERNELS, Facts, Kernel, choose, choose_all
from hetero_megatron.layers.kernels import kernel as kernel_module
from hetero_megatron.layers.kernels.kernel import Choice, needs
from hetero_megatron.recipe_sections import KernelsSection

FACTS = Facts(64)
CUDA = "needs a CUDA device (this run is on cpu)"


def made_up(*reasons: str | None) -> list[Kernel]:
    """Kernels `k0`, `k1`, ... of the operator `op` with these reasons against them."""
    return [
        Kernel("op", f"k{n}", lambda *_, reason=reason: reason, lambda n=n: lambda: n)
        for n, reason in enumerate(reasons)
    ]


def test_auto_takes_the_first_that_fits_and_keeps_the_reasons_against_those_before_it() -> None:
    chosen = choose("op", "auto", "cpu", torch.float32, FACTS, made_up("is far", "is old", None, None))
    assert chosen.kernel.name == "k2"
    assert chosen.passed_over == (("k0", "is far"), ("k1", "is old"))


def test_one_that_is_named_is_taken_though_another_would_come_first() -> None:
    chosen = choose("op", "k1", "cpu", torch.float32, FACTS, made_up(None, None))
    assert (chosen.kernel.name, chosen.passed_over) == ("k1", ())


def test_one_that_is_named_and_cannot_run_is_refused_though_another_could() -> None:
    with pytest.raises(LayerError, match=r"^kernels\.op: k0 cannot run here: it is far$"):
        choose("op", "k0", "cpu", torch.float32, FACTS, made_up("is far", None))


def test_when_nothing_fits_every_reason_is_given() -> None:
    with pytest.raises(LayerError, match="k0 cannot run here: it is far; k1 cannot run here: it is old"):
        choose("op", "auto", "cpu", torch.float32, FACTS, made_up("is far", "is old"))


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(LayerError, match=r"kernels\.op: there is no 'k7'; known: auto, k0, k1"):
        choose("op", "k7", "cpu", torch.float32, FACTS, made_up(None, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_torch_computes_everything(dtype: torch.dtype) -> None:
    chosen = choose_all({}, "cpu", dtype, FACTS)
    assert chosen.names == {
        "attention": "torch-sdpa",
        "rms_norm": "torch",
        "cross_entropy": "torch",
        "adam": "torch",
    }
    assert str(chosen) == (
        "kernels: attention torch-sdpa, rms_norm torch, cross_entropy torch, adam torch\n"
        f"  passed over: flash-attn, transformer-engine, torch-varlen, apex: {CUDA}"
    )
    assert set(chosen.load()) == set(chosen.names)


def test_what_is_not_passed_over_is_not_mentioned() -> None:
    wanted = {"attention": "torch-sdpa", "rms_norm": "torch", "adam": "torch"}
    assert "\n" not in str(choose_all(wanted, "cpu", torch.float32, FACTS))


def test_states_in_host_memory_are_updated_by_a_kernel_of_the_cpu() -> None:
    with pytest.raises(
        LayerError, match=r"kernels\.adam: apex cannot run here: it needs a CUDA device \(.* cpu"
    ):
        choose_all({"adam": "apex"}, "cuda", torch.float32, FACTS, "cpu")


def test_another_optimizer_has_no_adam_to_choose() -> None:
    chosen = choose_all({"adam": "auto"}, "cpu", torch.float32, FACTS, optimizer="sgd")
    assert "adam" not in chosen.names
    assert "adam" not in chosen.load()
    with pytest.raises(
        LayerError, match=r"^kernels\.adam: apex is named and the optimizer is sgd; leave it auto"
    ):
        choose_all({"adam": "apex"}, "cuda", torch.float32, FACTS, optimizer="sgd")


HERE, GONE = ("json", "torch"), {"install": "make it"}


@pytest.mark.parametrize(
    ("asks", "device", "dtype", "head_dim", "reason"),
    [
        ({"cuda": True, "half": True}, "cpu", torch.float32, 64, CUDA),
        ({"cuda": True, "half": True}, "cuda", torch.float32, 64, r"needs bf16 or fp16 \(this run computes in fp32"),
        ({"half": True}, "cuda", torch.float64, 64, "computes in torch.float64"),
        ({"whole_eights": True}, "cuda", torch.bfloat16, 20, r"multiple of 8, at most 256 \(this model has 20\)"),
        ({"whole_eights": True}, "cuda", torch.bfloat16, 264, r"at most 256 \(this model has 264\)"),
        (GONE | {"modules": ("json", "no_such_module")}, "cpu", torch.float32, 64, r"is not installed \(make it\)"),
        (GONE | {"newer": ("no-such-package", 2)}, "cpu", torch.float32, 64, r"is not installed \(make it\)"),
        ({"newer": ("torch", 99)}, "cpu", torch.float32, 64, r"needs version 99 or newer \(\d+\..* is installed\)"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said(
    asks: dict[str, object], device: str, dtype: torch.dtype, head_dim: int, reason: str
) -> None:
    found = needs(**asks)(device, dtype, Facts(head_dim))  # type: ignore[arg-type]
    assert found is not None
    kernel = Kernel("op", "k0", lambda *_: found, lambda: print)
    reason = reason.replace("(this run is on cpu)", r"\(this run is on cpu\)")
    with pytest.raises(LayerError, match=reason):
        choose("op", "k0", device, dtype, Facts(head_dim), [kernel])


def test_what_is_there_fits() -> None:
    asks = needs(cuda=True, half=True, whole_eights=True, modules=HERE, newer=("torch", 2))
    assert asks("cuda", torch.bfloat16, Facts(256)) is None


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: f"{kernel.op} {kernel.name}")
def test_to_ask_whether_a_kernel_fits_imports_nothing(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for a library must not start CUDA in the process that forks the ranks."""
    looked: list[str] = []
    monkeypatch.setattr(kernel_module, "find_spec", lambda name: looked.append(name))
    reason = kernel.unfit("cuda", torch.bfloat16, FACTS)
    assert (reason is not None) == bool(looked)
    assert all("." not in name or name.startswith("torch.") for name in looked), "find_spec imports parents"


@pytest.mark.parametrize("error", [ImportError("undefined symbol: x"), OSError("libcudart.so.99: not found")])
def test_a_library_that_does_not_load_is_refused_by_name(error: Exception) -> None:
    def load() -> None:
        raise error

    chosen = choose_all({}, "cpu", torch.float32, FACTS)
    broken = Choice(Kernel("adam", "k0", needs(), load))  # type: ignore[arg-type]
    kernels = replace(chosen, adam=broken)
    with pytest.raises(
        LayerError, match=rf"kernels\.adam: k0 is installed but cannot be loaded: {error}; repair"
    ):
        kernels.load()


def test_a_recipe_knows_the_same_names() -> None:
    fields = KernelsSection.model_fields
    known: dict[str, list[str]] = {}
    for kernel in KERNELS:
        known.setdefault(kernel.op, ["auto"]).append(kernel.name)
    assert {op: list(get_args(field.annotation)) for op, field in fields.items()} == known
