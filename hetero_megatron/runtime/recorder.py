"""What one rank did in one step, span by span: made only for steps that are traced."""

import time
from dataclasses import dataclass

import torch

from hetero_megatron.trace_file import LANES, TraceSpan

Moment = float | torch.cuda.Event
"""A point in time: seconds of `time.perf_counter`, or on a GPU an event in the current stream."""


@dataclass(frozen=True, slots=True)
class _Span:
    category: str
    name: str
    start: Moment
    end: Moment
    notes: dict[str, str | int | float]


class Recorder:
    """Spans of one rank, on a CPU by the host's clock and on a GPU by events, which cost nothing to wait for.

    Seconds are those of the wall clock, which all processes of a machine share; machines are as far apart as their
    clocks are set.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        """The step begins now."""
        self._rank, self._device = rank, device
        self._spans: list[_Span] = []
        self._base: torch.cuda.Event | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._wall = time.time()
            self._base = self._event()
        else:
            self._wall = time.time() - time.perf_counter()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def moment(self) -> Moment:
        """Now."""
        return time.perf_counter() if self._base is None else self._event()

    def add(
        self,
        category: str,
        name: str,
        start: Moment,
        end: Moment | None = None,
        **notes: str | int | float,
    ) -> None:
        """Something that took from `start` until `end`, or until now."""
        self._spans.append(_Span(category, name, start, self.moment() if end is None else end, notes))

    def spans(self, iteration: int) -> list[TraceSpan]:
        """All of them, in seconds of the wall clock; on a GPU once its work is done."""
        if self._base is not None:
            torch.cuda.synchronize(self._device)
        return [
            TraceSpan(
                self._rank,
                LANES.get(each.category, "communication"),
                each.name,
                each.category,
                self._seconds(each.start),
                self._seconds(each.end),
                {"iteration": iteration, **each.notes},
            )
            for each in self._spans
        ]

    def _seconds(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return self._wall + moment
        assert self._base is not None, "events are recorded on a GPU only"
        return self._wall + self._base.elapsed_time(moment) / 1e3
