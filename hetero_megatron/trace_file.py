"""What ranks did when, as a Chrome trace that Perfetto and chrome://tracing open; for simulated and for real steps.

Pure: spans in, text out. Whoever measures gives seconds since a common start.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

MICROSECONDS = 1e6
LANES: Mapping[str, str] = MappingProxyType(
    {"forward": "compute", "backward": "compute", "update": "compute"}
)
"""The lane of a category, `communication` where it is not named."""


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """Something that one rank did.

    Attributes:
        lane: a row of the rank, such as `compute` or `communication`.
        name: what is written on it, such as `F0`.
        category: what it is coloured and filtered by.
        start, end: seconds since the step began.
        notes: what a click on it shows.
    """

    rank: int
    lane: str
    name: str
    category: str
    start: float
    end: float
    notes: Mapping[str, str | int | float] = field(default_factory=dict)

    def since(self, moment: float) -> "TraceSpan":
        """The same with seconds counted from `moment`."""
        return replace(self, start=self.start - moment, end=self.end - moment)


@dataclass(frozen=True, slots=True)
class TraceCounter:
    """A number of one rank over time, such as bytes of memory: (seconds, value) where it changes."""

    rank: int
    name: str
    values: tuple[tuple[float, float], ...]


def chrome_trace(
    spans: Iterable[TraceSpan], names: Mapping[int, str], counters: Sequence[TraceCounter] = ()
) -> str:
    """The trace as JSON text: a process per rank, called as `names` says, a thread per lane.

    >>> chrome_trace([TraceSpan(0, "compute", "F0", "forward", 0.0, 0.5)], {0: "rank 0"}).count('"ph": "X"')
    1
    """
    events: list[dict[str, object]] = []
    for rank, name in sorted(names.items()):
        events.append(_meta(rank, "process_name", {"name": name}))
        events.append(_meta(rank, "process_sort_index", {"sort_index": rank}))
    lanes: dict[tuple[int, str], int] = {}
    for span in spans:
        own = [each for each in lanes if each[0] == span.rank]
        if (span.rank, span.lane) not in lanes:
            lanes[span.rank, span.lane] = len(own)
            events.append(_meta(span.rank, "thread_name", {"name": span.lane}, len(own)))
        events.append(
            {
                "ph": "X",
                "pid": span.rank,
                "tid": lanes[span.rank, span.lane],
                "name": span.name,
                "cat": span.category,
                "ts": (start := round(span.start * MICROSECONDS, 3)),
                # A difference of rounded ends: neighbours never overlap.
                "dur": round(round(span.end * MICROSECONDS, 3) - start, 3),
                "args": dict(span.notes),
            }
        )
    for counter in counters:
        events += [
            {
                "ph": "C",
                "pid": counter.rank,
                "name": counter.name,
                "ts": round(at * MICROSECONDS, 3),
                "args": {counter.name: value},
            }
            for at, value in counter.values
        ]
    lines = ",\n".join(json.dumps(event) for event in events)
    return '{"displayTimeUnit": "ms", "traceEvents": [\n' + lines + "\n]}\n"


def read_spans(text: str) -> list[TraceSpan]:
    """The spans of a trace that `chrome_trace` wrote.

    Raises:
        ValueError: the text is no such trace.

    >>> read_spans(chrome_trace([TraceSpan(0, "compute", "F0", "forward", 0.0, 0.5)], {0: "rank 0"}))[0].end
    0.5
    """
    try:
        events = json.loads(text)["traceEvents"]
        lanes = {
            (e["pid"], e["tid"]): e["args"]["name"]
            for e in events
            if e["ph"] == "M" and e["name"] == "thread_name"
        }
        return [
            TraceSpan(
                e["pid"],
                lanes[e["pid"], e["tid"]],
                e["name"],
                e["cat"],
                e["ts"] / MICROSECONDS,
                (e["ts"] + e["dur"]) / MICROSECONDS,
                e["args"],
            )
            for e in events
            if e["ph"] == "X"
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"no trace of this library: {error!r}") from error


def rank_title(rank: int, kind: str, pipeline: int, stage: int) -> str:
    """What a rank is called in a trace.

    >>> rank_title(3, "h20", 1, 0)
    'rank 3: h20, pipeline 1 stage 0'
    """
    return f"rank {rank}: {kind}, pipeline {pipeline} stage {stage}"


def _meta(rank: int, what: str, value: Mapping[str, object], lane: int = 0) -> dict[str, object]:
    return {"ph": "M", "pid": rank, "tid": lane, "name": what, "args": dict(value)}
