"""A strategy on its way through the store, with what there is to say of it."""

import base64
import pickle

from hetero_megatron.strategy import Strategy


def as_text(strategy: Strategy, said: str) -> str:
    """Both in one value of the store, which holds texts."""
    return base64.b64encode(pickle.dumps((strategy, said))).decode()


def from_text(text: str | bytes) -> tuple[Strategy, str]:
    """What `as_text` was given."""
    strategy, said = pickle.loads(base64.b64decode(text))
    return strategy, said
