"""The recursion against closed forms and against the schedule's own clock."""

import random

import pytest

from hetero_megatron.errors import PlannerError
from hetero_megatron.pipeline.action import parse_steps
from hetero_megatron.pipeline.boundary import Boundaries
from hetero_megatron.pipeline.lower import lower
from hetero_megatron.pipeline.schedule import tasks
from hetero_megatron.pipeline.timing import clock
from hetero_megatron.planner.recursion import Order, compile_order, order_of


def makespan(
    order: Order, forward: list[float], backward: list[float], travel: float = 0.0, late: bool = False
) -> float:
    seconds = [(forward if kind == "F" else backward)[stage] for stage, kind, _ in order.slots]
    ready = [0.0] * len(forward)
    return max(order.run(seconds, [travel] * len(order.boundaries), ready, late))


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 3), (4, 8), (6, 32)])
def test_equal_stages_take_micro_batches_and_depth_less_one(stages: int, micro_batches: int) -> None:
    for name in ("1f1b", "gpipe"):
        found = makespan(order_of(name, stages, micro_batches), [1.0] * stages, [2.0] * stages)
        assert found == pytest.approx((micro_batches + stages - 1) * 3.0)


def test_the_slowest_stage_and_the_way_through_all_decide_where_stages_differ() -> None:
    """(m - 1) max + sum, exact once the slowest stage never waits."""
    forward, backward, count = [1.0, 3.0, 2.0], [2.0, 6.0, 4.0], 32
    expected = (count - 1) * 9.0 + 18.0
    assert makespan(order_of("gpipe", 3, count), forward, backward) == pytest.approx(expected)
    # 1F1B need not wait for the last stages of all forwards before the first backward.
    found = makespan(order_of("1f1b", 3, count), forward, backward)
    assert count * 9.0 + 1.0 + 2.0 <= found <= expected


@pytest.mark.parametrize("chunks", [2, 4])
def test_interleaving_divides_the_bubble_by_the_number_of_chunks(chunks: int) -> None:
    stages, count = 4, 16
    work = 3.0 * count
    each = [1.0 / chunks] * stages, [2.0 / chunks] * stages
    bubble = makespan(order_of("interleaved", stages, count, chunks), *each) - work
    assert bubble == pytest.approx(3.0 * (stages - 1) / chunks)


def test_a_receive_that_is_asked_for_late_adds_its_way_to_every_pass() -> None:
    """Two stages in steady state: each pass of the slower one waits once for a message."""
    count, travel = 40, 0.1
    free = makespan(order_of("1f1b", 2, count), [1.0, 1.0], [2.0, 2.0], travel)
    late = makespan(order_of("1f1b", 2, count), [1.0, 1.0], [2.0, 2.0], travel, late=True)
    assert late - free == pytest.approx(0.0, abs=2 * count * travel)
    assert late >= free
    slow = makespan(order_of("1f1b", 2, count), [0.1, 1.0], [0.2, 2.0], travel, late=True)
    assert slow == pytest.approx(count * (3.0 + travel), rel=0.02)


def test_random_shapes_end_when_the_schedules_clock_says() -> None:
    generator = random.Random(7)
    for _ in range(40):
        name, chunks = generator.choice([("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3)])
        stages, count = generator.randint(2, 5), generator.randint(1, 9)
        forward = [generator.uniform(0.5, 2.0) for _ in range(stages)]
        backward = [generator.uniform(0.5, 2.0) for _ in range(stages)]
        travel = generator.choice([0.0, 0.3])
        timing = clock(
            [lower(tasks(name, stages, count, chunks), Boundaries.chain(stages, chunks))],
            lambda _, stage, kind, f=forward, b=backward: f[stage] if kind == "F" else b[stage],  # type: ignore[misc]
            travel,
        )
        found = makespan(order_of(name, stages, count, chunks), forward, backward, travel)
        assert found == pytest.approx(timing.makespan), (name, stages, count, chunks)


def test_micro_batches_of_different_sizes_are_timed_one_by_one() -> None:
    order = order_of("1f1b", 2, 3)
    sizes = [1.0, 5.0, 2.0]
    columns = [[size * (1 if kind == "F" else 2) for size in sizes] for _, kind, _ in order.slots]
    nothing = [[0.0] * 3 for _ in order.boundaries]
    varied = max(order.run_varied(columns, nothing, [0.0, 0.0], False))
    alike = [[size * 0 + 1.0 for size in sizes] for _ in order.slots]
    plain = order.run([1.0] * len(order.slots), [0.0] * len(order.boundaries), [0.5, 0.0], False)
    assert order.run_varied(alike, nothing, [0.5, 0.0], False) == plain
    assert varied >= 3 * sum(sizes)


def test_a_stage_starts_when_it_is_ready() -> None:
    order = order_of("1f1b", 1, 1)
    assert order.run([1.0, 2.0], [], [4.0]) == (7.0,)


def test_actions_that_wait_for_each_other_are_refused() -> None:
    stuck = (parse_steps("F0 B0 F1 B1"), parse_steps("F1 F0 B1 B0"))
    with pytest.raises(PlannerError, match=r"stage 0 never comes to B0: the actions wait for each other"):
        compile_order(stuck, Boundaries.chain(2))  # type: ignore[arg-type]
