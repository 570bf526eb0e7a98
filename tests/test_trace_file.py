"""Chrome traces."""

import json

from hetero_megatron.trace_file import TraceCounter, TraceSpan, chrome_trace


def test_ranks_are_processes_lanes_are_threads_and_seconds_are_microseconds() -> None:
    spans = [
        TraceSpan(3, "compute", "F0", "forward", 0.5, 0.75, {"tokens": 8}),
        TraceSpan(3, "communication", "SEND_F0", "send", 0.75, 0.8),
        TraceSpan(3, "compute", "B0", "backward", 0.8, 1.0),
    ]
    counter = TraceCounter(3, "memory bytes", ((0.0, 5.0), (0.5, 9.0)))
    text = chrome_trace(spans, {3: "rank 3"}, [counter])
    events = json.loads(text)["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["rank 3"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {0: "compute", 1: "communication"}
    first = next(event for event in events if event["name"] == "F0")
    assert (first["ts"], first["dur"], first["pid"], first["tid"]) == (5e5, 2.5e5, 3, 0)
    assert first["args"] == {"tokens": 8}
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"memory bytes": 5.0}, {"memory bytes": 9.0}]


def test_an_empty_trace_is_json_too() -> None:
    assert json.loads(chrome_trace([], {}))["traceEvents"] == []
