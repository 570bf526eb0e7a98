"""What is deferred runs once, in order, and without gradients of its own."""

import torch

from hetero_megatron.runtime.deferred import Deferred


def test_tasks_run_once_and_in_order() -> None:
    deferred, seen = Deferred(), []
    assert deferred.run() == 0.0
    for number in range(3):
        deferred.add(lambda number=number: seen.append(number))
    assert deferred.run() > 0.0
    assert seen == [0, 1, 2]
    deferred.run()
    assert seen == [0, 1, 2]


def test_a_task_that_adds_another_one_is_followed_by_it() -> None:
    deferred, seen = Deferred(), []
    deferred.add(lambda: deferred.add(lambda: seen.append("second")))
    deferred.run()
    assert seen == ["second"]


def test_tasks_leave_no_trace_for_autograd() -> None:
    deferred, buffer = Deferred(), torch.zeros(2)
    deferred.add(lambda: buffer.add_(torch.ones(2, requires_grad=True)))
    deferred.run()
    assert not buffer.requires_grad
    assert buffer.tolist() == [1.0, 1.0]
