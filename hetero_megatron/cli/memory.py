"""`explain --memory`: what every rank's device has to hold, as a table and as JSON (paper Table 7)."""

from collections.abc import Sequence
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table

from hetero_megatron.cluster import ranges_text
from hetero_megatron.memory import RankMemory

WIDTH = 100
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def memory_json(needs: Sequence[RankMemory]) -> dict[str, object]:
    """`fits`, and per rank every part in bytes."""
    return {
        "fits": all(each.fits for each in needs),
        "memory": [
            {
                "rank": each.rank,
                "pipeline": each.pipeline,
                "stage": each.stage,
                "device": each.kind,
                **asdict(each.parts),
                "need": each.parts.total,
                "capacity": each.capacity,
                "fits": each.fits,
                "host": each.host,
                "in_flight": list(each.in_flight),
                "activations_by_layer": {str(layer): size for layer, size in each.by_layer.items()},
                "remedies": [{"change": text, "frees": freed} for text, freed in each.remedies],
            }
            for each in needs
        ],
    }


def print_memory(needs: Sequence[RankMemory]) -> None:
    """The table, ranks that are alike in one row, and a sentence for those that do not fit."""
    console = Console(highlight=False)
    name, unit = next(
        (each for each in _UNITS if max(one.parts.total for one in needs) >= each[1]), _UNITS[-1]
    )
    rows = _folded(needs, unit)
    console.print(
        f"memory per rank in {name}, for micro-batches as large as the recipe allows", soft_wrap=True
    )
    wide = Console(highlight=False, width=max(WIDTH, console.width))
    wide.print(_table(rows))
    console.print(
        "flight: micro-batches between F and B at the peak, by chunk. layer: what the largest layer keeps of one "
        "micro-batch. not counted: driver, communication library, fragmentation",
        soft_wrap=not console.is_terminal,
    )
    for ranks, each, _ in rows:
        if not each.fits:
            console.print(_verdict(ranks, each, name, unit), style="red", soft_wrap=True)


Row = tuple[list[int], RankMemory, tuple[str, ...]]
"""Ranks, the needs of the first of them, and the cells that all of them show."""


def _folded(needs: Sequence[RankMemory], unit: int) -> list[Row]:
    """Ranks that show the same numbers, in order of the first of them."""
    found: dict[tuple[str, ...], Row] = {}
    for each in needs:
        cells = _cells(each, unit)
        found.setdefault(cells, ([], each, cells))[0].append(each.rank)
    return list(found.values())


def _cells(each: RankMemory, unit: int) -> tuple[str, ...]:
    parts = each.parts
    numbers = (
        max(each.by_layer.values(), default=0),
        parts.parameters,
        parts.gradients,
        parts.master,
        parts.moments,
        parts.activations,
        parts.buffers,
        parts.temporary,
        each.host,
    )
    return (
        str(each.stage),
        ",".join(map(str, each.in_flight)),
        *(_number(number, unit) for number in numbers),
        _number(parts.total, unit) + ("" if each.fits else "!"),
        f"{each.kind} {_number(each.capacity, unit)}",
    )


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("ranks", overflow="fold", min_width=6)
    columns = (
        "stage",
        "flight",
        "layer",
        "param",
        "grad",
        "master",
        "Adam",
        "activ",
        "buffer",
        "temp",
        "host",
    )
    for column in (*columns, "need", "device"):
        table.add_column(column, justify="right", no_wrap=True)
    for ranks, each, cells in rows:
        # A range per line: in so narrow a column, several would be broken anywhere.
        table.add_row(ranges_text(ranks).replace(", ", "\n"), *cells, style="" if each.fits else "red")
    return table


def _verdict(ranks: Sequence[int], each: RankMemory, name: str, unit: int) -> str:
    many, one = ("s", "") if len(ranks) > 1 else ("", "s")
    remedies = "".join(f"{change} frees {_number(freed, unit)}, " for change, freed in each.remedies)
    return (
        f"rank{many} {ranges_text(ranks)} need{one} {_number(each.parts.total, unit)} {name}, but a device of kind "
        f"{each.kind} has {_number(each.capacity, unit)} {name}: {remedies}or give the stage fewer layers or more ranks"
    )


def _number(count: int, unit: int) -> str:
    if not count:
        return "-"
    return f"{count / unit:,.{0 if count >= 1000 * unit else 1}f}"
