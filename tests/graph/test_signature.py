"""Signatures are read from einsum text."""

import pytest

from hetero_megatron.errors import GraphError
from hetero_megatron.graph import Signature


def test_operands_output_and_opaque_arguments_are_read() -> None:
    signature = Signature.parse("t (g r k), t (g k); segments -> t (g r k)")
    assert signature.operands == ((("t",), ("g", "r", "k")), (("t",), ("g", "k")))
    assert signature.output == (("t",), ("g", "r", "k"))
    assert signature.opaque == ("segments",)
    assert signature.factor_dim(0, "r") == 1
    assert signature.factor_dim(1, "r") is None
    assert signature.factor_dim(-1, "k") == 1


def test_an_output_without_dims_is_a_scalar() -> None:
    assert Signature.parse("t v, t ->").output == ()


def test_equal_declarations_are_equal_and_hash_alike() -> None:
    first, second = (Signature.parse("t  i, o i -> t o", linear=True) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != Signature.parse("t i, o i -> t o")


def test_divisible_factors_leave_the_others_indivisible() -> None:
    assert Signature.parse("t h, h -> t h", divisible=("t",)).indivisible == ("h",)


def test_additive_is_linear() -> None:
    assert Signature.parse("a, a -> a", additive=True).linear


@pytest.mark.parametrize(
    ("text", "keywords", "message"),
    [
        ("t i, o i", {}, "write 'operands -> output' with one '->'"),
        ("t -> t -> t", {}, "write 'operands -> output' with one '->'"),
        ("t i -> t o", {}, "output factor 'o' is in no operand"),
        ("t (g k -> t", {}, r"cannot read 't \(g k'"),
        ("t t -> t", {}, "'t t' has factor 't' twice"),
        ("t h -> t h", {"indivisible": ("x",)}, r"indivisible names 'x'; its factors are \['h', 't'\]"),
        ("t h -> t h", {"exact": ("x",)}, "exact names 'x'"),
        ("t h -> t h", {"divisible": ("t",), "indivisible": ("t",)}, "'t' is both divisible and indivisible"),
    ],
)
def test_a_text_that_says_nothing_is_refused(
    text: str, keywords: dict[str, tuple[str, ...]], message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        Signature.parse(text, **keywords)  # type: ignore[arg-type]  # keywords are tuples of factors here
