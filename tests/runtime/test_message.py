"""Which slices are one piece of a flat buffer, and which messages need no packing."""

from collections.abc import Sequence

import pytest
import torch

from hetero_megatron.annotation import Annotation
from hetero_megatron.runtime.message import Arena, Message, Place
from hetero_megatron.runtime.pages import prefer_large_pages
from hetero_megatron.runtime.state import ParameterSlot

FLAT, CPU = torch.arange(60.0), torch.device("cpu")


def place(offset: int, shape: tuple[int, ...], *spans: tuple[int, int]) -> Place:
    bounds = tuple((0, size) for size in shape)
    slot = ParameterSlot("w", shape, Annotation.on((0,)), bounds, offset, True)
    return Place(FLAT, slot, tuple(slice(lo, hi) for lo, hi in spans))


@pytest.mark.parametrize(
    ("found", "start"),
    [
        (place(7, (4, 3), (0, 4), (0, 3)), 7),
        (place(7, (4, 3), (1, 3), (0, 3)), 10),
        (place(7, (4, 3), (2, 3), (1, 3)), 14),
        (place(7, (4, 3), (0, 4), (1, 3)), None),
        (place(7, (4, 1), (1, 3), (0, 1)), 8),
        (place(0, (5,), (2, 4)), 2),
    ],
)
def test_a_slice_is_one_piece_of_memory_when_only_its_first_dim_is_cut(
    found: Place, start: int | None
) -> None:
    assert found.start == start
    assert found.view().is_contiguous() == (start is not None)
    if start is not None:
        assert found.view().flatten()[0] == start


def message(places: Sequence[Place | None]) -> Message:
    return Message.of(
        1, range(len(places)), places, [6 if each is None else each.view().numel() for each in places]
    )


def test_a_message_whose_pieces_follow_one_another_is_sent_as_it_lies() -> None:
    first, second = place(6, (2, 3), (0, 2), (0, 3)), place(12, (4, 3), (0, 2), (0, 3))
    whole = message([first, second]).whole(CPU)
    assert whole is not None
    assert whole.tolist() == list(range(6, 18))
    assert whole.data_ptr() == FLAT[6:].data_ptr()
    for places in ([second, first], [first, None], [None], [place(6, (2, 3), (0, 2), (0, 2))]):
        assert message(places).whole(CPU) is None
    assert message([first]).whole(torch.device("meta")) is None


def test_an_arena_gives_its_parts_out_again_when_a_round_is_over() -> None:
    arena = Arena(10, CPU)
    first, second = arena.take(4), arena.take(6)
    assert second.data_ptr() == first.data_ptr() + 16
    with pytest.raises(AssertionError, match="1 elements do not fit behind 10"):
        arena.take(1)
    arena.empty()
    assert arena.take(10).data_ptr() == first.data_ptr()


def test_advice_about_pages_leaves_what_a_buffer_holds() -> None:
    for elements in (0, 3, 3 << 20):
        flat = torch.ones(elements)
        prefer_large_pages(flat)
        assert flat.sum() == elements
