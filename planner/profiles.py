"""Measured seconds as data, written to JSON and read back, and the times that follow from them (paper A.1).

An empty Profiles is the analytic one: published figures times sustained shares. What was measured replaces it, kind by
kind and degree by degree; what is missing beside a measurement is scaled from the nearest one.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from hetero_megatron.cluster import DeviceKind, Link, model_of
from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.curves import Curve, Point, fit, positive
from hetero_megatron.planner.rates import bytes_per_second

VERSION = 1
RESERVED_BYTES = 3 * 2**29
"""Of a GPU's memory, for what is no tensor, where no profile says it: the driver's context (about 0.5 GiB) and NCCL's
buffers and cuBLAS's workspaces (about 1 GiB). Assumed, not measured. The paper's C6 leaves 2.0 GiB on its fullest rank."""
LEAST_GPU_BYTES = 4 * 2**30
"""Devices with less memory are no GPUs: all of it is theirs to fill."""
Unit = Literal["layer", "embedding", "head"]
Phase = Literal["forward", "backward", "weight_gradient"]
Operation = Literal["p2p", "all_reduce", "reduce_scatter", "all_gather"]
UNITS, PHASES, OPERATIONS = get_args(Unit), get_args(Phase), get_args(Operation)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one phase of one unit took on one stage of `tp` x `cp` ranks, TP and CP collectives included.

    Attributes:
        tokens: of the whole micro-batch, over all context-parallel parts.
        seq_length: length of its documents.
        seconds: `weight_gradient` is the part of `backward` that could be put off.
    """

    kind: str
    precision: str
    unit: Unit
    phase: Phase
    tp: int
    cp: int
    tokens: int
    seq_length: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one message, or one collective of `ranks` ranks, took on a class of link.

    `bytes`: of the message; of an all-reduce the tensor's; of the others the whole tensor's, all parts together.
    """

    link: str
    operation: Operation
    ranks: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that one unit keeps of a micro-batch between forward and backward, on one rank."""

    kind: str
    precision: str
    unit: Unit
    tp: int
    cp: int
    tokens: int
    seq_length: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Update:
    """What the optimizer took for one rank's elements, gradient norm included."""

    kind: str
    precision: str
    elements: int
    seconds: float


@dataclass(frozen=True)
class Profiles:
    """All that was measured on one kind of cluster for one model.

    Attributes:
        model: sizes of the model that was measured, by name; empty when nothing was.
        reserved_bytes: per device kind, device memory that training needs beside its tensors; else `RESERVED_BYTES`.
        fixed_seconds: per device kind, what every step takes beside all that is counted.
        notes: about the machine, for people.

    Raises:
        PlannerError: a value that no measurement can have.
    """

    model: Mapping[str, int] = field(default_factory=dict)
    measurements: tuple[Measurement, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    updates: tuple[Update, ...] = ()
    kept: tuple[Kept, ...] = ()
    reserved_bytes: Mapping[str, int] = field(default_factory=dict)
    fixed_seconds: Mapping[str, float] = field(default_factory=dict)
    notes: str = ""

    def __post_init__(self) -> None:
        for each in self.measurements:
            if each.unit not in UNITS or each.phase not in PHASES:
                raise PlannerError(
                    f"profile: {each.unit!r} {each.phase!r} is no unit and phase; units: {', '.join(UNITS)}; "
                    f"phases: {', '.join(PHASES)}"
                )
            if min(each.tp, each.cp, each.tokens, each.seq_length) < 1 or not 0 <= each.seconds < np.inf:
                raise PlannerError(
                    f"profile: {each.kind} {each.unit} {each.phase} at tp {each.tp}, cp {each.cp}, {each.tokens} tokens of "
                    f"documents of {each.seq_length} took {each.seconds} s; counts are 1 or more, and seconds 0 or more"
                )
        for moved in self.transfers:
            if moved.operation not in OPERATIONS or moved.ranks < 2 or moved.bytes < 0 or moved.seconds < 0:
                raise PlannerError(
                    f"profile: {moved.operation!r} of {moved.bytes} bytes among {moved.ranks} ranks on {moved.link} took "
                    f"{moved.seconds} s; operations: {', '.join(OPERATIONS)}, of 2 ranks or more, nothing negative"
                )

    def reserved(self, kind: DeviceKind) -> int:
        """Bytes of a device that a plan may not fill."""
        assumed = 0 if model_of(kind.name) == "cpu" or kind.memory_bytes < LEAST_GPU_BYTES else RESERVED_BYTES
        return int(self.reserved_bytes.get(kind.name, assumed))

    def curve(
        self, kind: str, precision: str, tp: int, cp: int, unit: Unit, phase: Phase, prior: Curve
    ) -> Curve | None:
        """The fitted time, or None where just this degree was not measured."""
        points = self._points.get((kind, precision, tp, cp, unit, phase))
        return fit(points, prior) if points else None

    def measured_degrees(self, kind: str, precision: str) -> tuple[tuple[int, int], ...]:
        """(tp, cp) of what was measured on a kind of device, ascending."""
        return tuple(sorted({key[2:4] for key in self._points if key[:2] == (kind, precision)}))

    @cached_property
    def _points(self) -> dict[tuple[str, str, int, int, str, str], list[Point]]:
        found: dict[tuple[str, str, int, int, str, str], list[Point]] = {}
        for each in self.measurements:
            key = (each.kind, each.precision, each.tp, each.cp, each.unit, each.phase)
            found.setdefault(key, []).append(Point(each.tokens, each.seq_length, each.seconds))
        return found

    def transfer_seconds(self, link: Link, operation: Operation, ranks: int, size: float) -> float:
        """Time of one message of `size` bytes, or of a collective on a whole tensor of `size` bytes among `ranks`."""
        if ranks < 2 or size <= 0:
            return 0.0
        known = self._latency_and_rate(link.name, operation, ranks)
        if known is not None:
            return known[0] + known[1] * size
        steps = {"p2p": 1.0, "all_reduce": 2.0 * (ranks - 1)}.get(operation, ranks - 1.0)
        share = 1.0 if operation == "p2p" else 1 / ranks
        message = self._latency_and_rate(link.name, "p2p", 2)
        if message is not None:
            return steps * (message[0] + message[1] * share * size)
        return steps * (link.latency_s + share * size / bytes_per_second(link))

    def latency(self, link: Link, operation: Operation, ranks: int) -> float | None:
        """What a small message or collective takes, or None where just this one was not measured."""
        known = self._latency_and_rate(link.name, operation, ranks)
        return None if known is None else known[0]

    def _latency_and_rate(self, link: str, operation: str, ranks: int) -> tuple[float, float] | None:
        return self._transfers.get((link, operation, ranks))

    @cached_property
    def _transfers(self) -> dict[tuple[str, str, int], tuple[float, float]]:
        points: dict[tuple[str, str, int], list[Point]] = {}
        for each in self.transfers:
            points.setdefault((each.link, each.operation, each.ranks), []).append(
                Point(max(1, each.bytes), max(1, each.bytes), each.seconds)
            )
        found = {}
        for key, own in points.items():
            rows = np.array([[1.0, point.tokens] for point in own])
            seconds = np.array([max(point.seconds, 1e-9) for point in own])
            latency, rate = positive(rows / seconds[:, None])
            found[key] = (float(latency), float(rate))
        return found

    def update_seconds(self, kind: str, precision: str, elements: float) -> float | None:
        """Time of the optimizer for so many elements, or None where it was not measured."""
        known = self._updates.get((kind, precision))
        return None if known is None else known[0] + known[1] * elements

    @cached_property
    def _updates(self) -> dict[tuple[str, str], tuple[float, float]]:
        points: dict[tuple[str, str], list[Update]] = {}
        for each in self.updates:
            points.setdefault((each.kind, each.precision), []).append(each)
        found = {}
        for key, own in points.items():
            rows = np.array([[1.0 if len(own) > 1 else 0.0, each.elements] for each in own])
            constant, rate = positive(rows / np.array([[max(each.seconds, 1e-9)] for each in own]))
            found[key] = (float(constant), float(rate))
        return found

    def kept_bytes(self, kind: str, precision: str, unit: Unit, tp: int, tokens: int) -> int | None:
        """Measured bytes of a unit on a part with `tokens` tokens, in proportion from the nearest measured size."""
        known = self._kept.get((kind, precision, unit, tp))
        if not known:
            return None
        near = min(known, key=lambda each: (abs(each.tokens // each.cp - tokens), -each.tokens))
        return -(-near.bytes * tokens // (near.tokens // near.cp))

    @cached_property
    def _kept(self) -> dict[tuple[str, str, str, int], list[Kept]]:
        found: dict[tuple[str, str, str, int], list[Kept]] = {}
        for each in self.kept:
            found.setdefault((each.kind, each.precision, each.unit, each.tp), []).append(each)
        return found

    def slowed(self, speeds: Mapping[str, float]) -> "Profiles":
        """With what devices of these kinds (`h20 at 0.5`) would have measured, at so many times the speed of their model."""

        def more(entries: tuple[Any, ...], timed: bool) -> tuple[Any, ...]:
            return entries + tuple(
                replace(each, kind=kind, **({"seconds": each.seconds / speed} if timed else {}))
                for kind, speed in speeds.items()
                for each in entries
                if each.kind == model_of(kind)
            )

        def known(values: Mapping[str, Any]) -> dict[str, Any]:
            return {**values, **{kind: values[model_of(kind)] for kind in speeds if model_of(kind) in values}}

        return replace(
            self,
            measurements=more(self.measurements, True),
            updates=more(self.updates, True),
            kept=more(self.kept, False),
            reserved_bytes=known(self.reserved_bytes),
            fixed_seconds=known(self.fixed_seconds),
        )

    def to_json(self) -> str:
        """The profile as text; `from_json` reads it back."""
        value = {
            "version": VERSION,
            "model": dict(self.model),
            "notes": self.notes,
            "reserved_bytes": dict(self.reserved_bytes),
            "fixed_seconds": dict(self.fixed_seconds),
            **{
                name: [asdict(each) for each in getattr(self, name)]
                for name in ("measurements", "transfers", "updates", "kept")
            },
        }
        lines = [
            f'  "{key}": '
            + (
                "[\n" + ",\n".join(f"    {json.dumps(each)}" for each in part) + "\n  ]"
                if isinstance(part, list) and part
                else json.dumps(part)
            )
            for key, part in value.items()
        ]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @staticmethod
    def from_json(text: str) -> "Profiles":
        """The profile that `to_json` wrote.

        Raises:
            PlannerError: no JSON, another version, or entries that are no measurements.
        """
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlannerError(f"profile: line {error.lineno} is no JSON: {error.msg}") from error
        version = value.get("version") if isinstance(value, dict) else None
        if version != VERSION:
            raise PlannerError(
                f"profile: version {version!r}; this library reads version {VERSION}, which `profile` writes"
            )
        return Profiles(
            model=_mapping(value, "model"),
            measurements=tuple(_entries(value, "measurements", Measurement)),
            transfers=tuple(_entries(value, "transfers", Transfer)),
            updates=tuple(_entries(value, "updates", Update)),
            kept=tuple(_entries(value, "kept", Kept)),
            reserved_bytes=_mapping(value, "reserved_bytes"),
            fixed_seconds=_mapping(value, "fixed_seconds"),
            notes=str(value.get("notes", "")),
        )


_WORDS: Mapping[type, str] = {int: "an int", float: "a float", str: "a text"}


def _mapping(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = value.get(name, {})
    if not isinstance(part, dict) or not all(isinstance(each, int | float) for each in part.values()):
        raise PlannerError(f"profile: {name} is {part!r}; a number for each name is right")
    return part


def _entries(value: Mapping[str, Any], name: str, kind: type[Any]) -> list[Any]:
    types = {each.name: each.type for each in fields(kind)}
    found = []
    for place, entry in enumerate(value.get(name, [])):
        if not isinstance(entry, dict) or entry.keys() != types.keys():
            raise PlannerError(f"profile: {name}[{place}] is {entry!r}; it has the keys {', '.join(types)}")
        for key, wanted in types.items():
            accepted = {int: (int,), float: (int, float)}.get(wanted, (str,))  # type: ignore[arg-type]  # or a Literal
            if not isinstance(entry[key], accepted) or isinstance(entry[key], bool):
                raise PlannerError(
                    f"profile: {name}[{place}].{key} is {entry[key]!r}; {_WORDS[accepted[-1]]} is right"
                )
        found.append(kind(**entry))
    return found
