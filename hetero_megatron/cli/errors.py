"""How a refusal reaches a person: one red message on stderr, exit code 2, no traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from hetero_megatron.errors import HeteroError

REFUSED = 2


@contextmanager
def reported() -> Iterator[None]:
    """A HeteroError becomes a message and exit code 2; anything else is a defect and keeps its traceback."""
    try:
        yield
    except HeteroError as error:
        message = Text.assemble(("error: ", "bold red"), (str(error), "red"))
        Console(stderr=True, soft_wrap=True, highlight=False).print(message)
        sys.exit(REFUSED)
