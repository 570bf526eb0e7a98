"""Pipelines in short."""

from typing import Any

from tests.distributed.training import stage


def one_rank_stages(*layers: str) -> list[Any]:
    return [stage(str(rank), numbers) for rank, numbers in enumerate(layers)]
