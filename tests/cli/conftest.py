"""What runs of the command line that lose ranks are compared with."""

from pathlib import Path

import pytest

from hetero_megatron import train
from hetero_megatron.recipe import load_recipe
from tests.cli.elastic_runs import Losses, Place


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Losses]:
    """Where the corpus is, and the losses of a run that is not elastic."""
    place = Place(tmp_path_factory.mktemp("undisturbed"), tmp_path_factory.mktemp("corpus"))
    assert train.pretrain(train.prepare(load_recipe(place.recipe()))) == 0
    return place.cache, place.losses()


@pytest.fixture
def place(tmp_path: Path, undisturbed: tuple[Path, Losses]) -> Place:
    return Place(tmp_path, undisturbed[0])


@pytest.fixture
def expected(undisturbed: tuple[Path, Losses]) -> list[tuple[int, object]]:
    return [(number, pytest.approx(loss, rel=1e-5)) for number, loss in undisturbed[1]]
