"""Traces of machines that come and go, as changes of a cluster's ranks.

Formats:
- `.csv`: `milliseconds,add|remove,name` a line, ascending; machines by name (Bamboo's spot instances);
- `.json`: `[{"Time": seconds, "GPUs": how many are there}, ...]` (Sailor's A100); who goes is drawn by a seed, who
  comes takes the lowest free place.
"""

import csv
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.churn import Change

NODE, DEVICE = "node", "device"
LOSES = (NODE, DEVICE)


@dataclass(frozen=True, slots=True)
class Trace:
    """Changes of places: a machine that comes takes the lowest place that is free.

    Attributes:
        places: how many were taken at once at most.
        seconds: from the first machine to the last change.
        changes: (second, places that become free, places that are taken), ascending.
    """

    places: int
    seconds: float
    changes: tuple[tuple[float, frozenset[int], frozenset[int]], ...]


def read_trace(path: Path) -> Trace:
    """A trace from a file.

    Raises:
        PlannerError: the file has none of the formats.
    """
    try:
        text = path.read_text(encoding="utf-8")
        steps = list(_counted(text) if path.suffix == ".json" else _named(text))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlannerError(
            f"{path} is no trace: {error}; `milliseconds,add|remove,name` lines in a .csv, or a .json list of "
            '{"Time": seconds, "GPUs": count}'
        ) from error
    if not steps:
        raise PlannerError(f"{path} has no change in it")
    first = steps[0][0]
    places = 1 + max(place for _, _, taken in steps for place in taken)
    shifted = tuple((at - first, freed, taken) for at, freed, taken in steps)
    return Trace(places, shifted[-1][0], shifted)


_Step = tuple[float, frozenset[int], frozenset[int]]


def _named(text: str) -> Iterator[_Step]:
    places: dict[str, int] = {}
    rows = [row for row in csv.reader(text.splitlines()) if row]
    for at, group in groupby(rows, key=lambda row: int(row[0])):
        freed, taken = set(), set()
        events = [(what.strip(), name) for _, what, name in group]
        if unknown := {what for what, _ in events} - {"add", "remove"}:
            raise ValueError(f"{sorted(unknown)[0]!r} is neither add nor remove")
        for what, name in sorted(events, key=lambda event: event[0] == "add"):
            if what == "remove":
                freed.add(places.pop(name))
            else:
                places[name] = _lowest_free(places.values())
                taken.add(places[name])
        yield at / 1000, frozenset(freed), frozenset(taken)


def _counted(text: str) -> Iterator[_Step]:
    there: set[int] = set()
    chance = random.Random(0)
    for entry in json.loads(text):
        count = int(entry["GPUs"])
        freed = set(chance.sample(sorted(there), max(0, len(there) - count)))
        there -= freed
        taken = set()
        while len(there) < count:
            taken.add(_lowest_free(there))
            there |= taken
        yield float(entry["Time"]), frozenset(freed), frozenset(taken)


def _lowest_free(taken: Iterable[int]) -> int:
    held = set(taken)
    return next(place for place in range(len(held) + 1) if place not in held)


def on_cluster(trace: Trace, cluster: Cluster, loses: str = NODE) -> tuple[Change, ...]:
    """What happens to a cluster's nodes when each does what one place of the trace does: the rates per machine stay.

    Node n of N does what place n x places // N does. Under `node` all devices of a node come and go. Under `device` all
    are there from the beginning, and every loss takes one device of the node, in turn, which comes back when the place is
    taken again.
    """
    nodes: dict[int, list[int]] = {}
    for device in cluster.devices:
        nodes.setdefault(device.node, []).append(device.rank)
    if trace.places < len(nodes):
        raise PlannerError(f"a trace of {trace.places} machines is too small for {len(nodes)} nodes")
    followed = {
        number * trace.places // len(nodes): ranks for number, (_, ranks) in enumerate(sorted(nodes.items()))
    }
    changes = list(_whole(trace, followed) if loses == NODE else _single(trace, followed))
    return tuple(change for change in changes if change.lost or change.joined)


def _whole(trace: Trace, followed: Mapping[int, Sequence[int]]) -> Iterator[Change]:
    for at, freed, taken in trace.changes:
        lost, joined = (
            frozenset(rank for place in own if place in followed for rank in followed[place])
            for own in (freed, taken)
        )
        # A machine that is replaced at once has lost what it held, and is there again only after that.
        yield Change(at, lost, joined - lost)
        yield Change(at, joined=joined & lost)


def _single(trace: Trace, followed: Mapping[int, Sequence[int]]) -> Iterator[Change]:
    everyone = frozenset(rank for ranks in followed.values() for rank in ranks)
    yield Change(0.0, joined=everyone)
    losses = dict.fromkeys(followed, 0)
    gone: dict[int, int] = {}
    for at, freed, taken in trace.changes:
        for place in sorted(freed & followed.keys()):
            ranks = followed[place]
            gone[place] = ranks[losses[place] % len(ranks)]
            losses[place] += 1
        yield Change(at, frozenset(gone[place] for place in freed & followed.keys()))
        yield Change(at, joined=frozenset(gone.pop(place) for place in sorted(taken & gone.keys())))
