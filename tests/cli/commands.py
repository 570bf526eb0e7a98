"""The command line, called in this process."""

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

from hetero_megatron.cli.main import main

RECIPES = Path(__file__).parent.parent.parent / "recipes"
C1, C2 = str(RECIPES / "paper" / "c1.yaml"), str(RECIPES / "paper" / "c2.yaml")
# Two pipelines of unequal depth; the first stage is tensor-parallel, the second is not.
SMALL = """
model: {preset: llama_tiny, num_layers: 2, hidden_size: 32, ffn_hidden_size: 64}
strategy:
  pipelines:
  - {micro_batches: 2, micro_batch_size: 1, stages: [{ranks: 0-1, layers: 0}, {ranks: 2, layers: 1}]}
  - {micro_batches: 1, micro_batch_size: 1, stages: [{ranks: 3, layers: 0-1}]}
training: {train_iters: 3, global_batch_size: 3, seq_length: 64, lr: 1e-2, log_interval: 1}
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """Exit code and what was printed."""

    code: int
    out: str
    err: str


def run(*arguments: str) -> Ended:
    """`hetero-megatron` with these arguments, as when it is piped."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())


def refusal(*arguments: str) -> str:
    """The one message of a command that is refused: exit code 2, nothing on stdout, no traceback."""
    ended = run(*arguments)
    assert ended.code == 2, ended
    assert ended.out == ""
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1, ended.err
    return ended.err.removeprefix("error: ").removesuffix("\n")
