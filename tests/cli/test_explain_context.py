"""What `explain` says that context-parallel attention sends is what a run sends."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from hetero_megatron.cli.context import attention_lines
from hetero_megatron.models.llama import Llama
from hetero_megatron.runtime.context_group import Messages, WorldChannel
from hetero_megatron.runtime.session import Session
from hetero_megatron.strategy import Stage
from tests.cli.commands import SMALL, run
from tests.cli.test_explain import explained
from tests.distributed.training import T0, build, sequences, strategy, train

LENGTH, MICRO_BATCHES = 16, 2
PLANS = {
    "TP2 CP2": (Stage((0, 1, 2, 3), (0, 3), 2, 2), "ring"),
    "TP2+TP1": (Stage((0, 1, 2), (0, 3), (2, 1)), "ring"),
    "CP3": (Stage((0, 1, 2), (0, 3), 1, 3), "ring"),
    "Ulysses TP2 CP2": (Stage((0, 1, 2, 3), (0, 3), 2, 2), "ulysses"),
    "Ulysses CP4, kv heads repeated": (Stage((0, 1, 2, 3), (0, 3), 1, 4), "ulysses"),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_bytes_are_those_that_a_run_sends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, mode = PLANS[name]
    plan = strategy((MICRO_BATCHES, 2, [stage]), context_parallel=mode)
    sent: list[int] = []
    exchange, all_to_all = WorldChannel.exchange, WorldChannel.all_to_all

    def counted(channel: WorldChannel, sends: Messages, receives: Messages, tag: int) -> Callable[[], None]:
        sent.extend(message.nbytes for _, message in sends)
        return exchange(channel, sends, receives, tag)

    def swapped(channel: WorldChannel, pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        sent.extend(piece.nbytes for place, piece in enumerate(pieces) if place != part[0])
        return all_to_all(channel, pieces, sizes)

    part: list[int] = []

    def note(session: Session) -> None:
        part.append(session.program.part_of(session.world.rank))

    monkeypatch.setattr(WorldChannel, "exchange", counted)
    monkeypatch.setattr(WorldChannel, "all_to_all", swapped)
    found = train(plan, [sequences(2 * MICRO_BATCHES, LENGTH)], prepare=note, collect=lambda _: sum(sent))
    (line,) = attention_lines(build(Llama(T0), plan), LENGTH, T0.head_size, 4)
    assert (line.pipeline, line.mode, line.layers) == (0, mode, (0, 1, 2, 3))
    layers = MICRO_BATCHES * len(line.layers)
    assert sum(found.extra.values()) == layers * (line.forward_bytes + line.backward_bytes)


@pytest.fixture
def shared(tmp_path: Path) -> str:
    path = tmp_path / "shared.yaml"
    path.write_text(
        SMALL.split("strategy:")[0] + "strategy: {dp: 2, cp: 2, micro_batches: 2, micro_batch_size: 1}\n"
        "training: {train_iters: 1, global_batch_size: 4, seq_length: 64, lr: 1}\n"
    )
    return str(path)


def test_pipelines_that_are_alike_share_one_sentence(shared: str) -> None:
    """By hand: one half sees 32 and the other 16 rows of keys and values, of 16 columns in FP32."""
    forward = 48 * 2 * 16 * 4
    told = (
        f"ring attention over 2 parts in each of pipelines 0-1 sends {forward / 1e6:.3f} MB forward and "
        f"{2 * forward / 1e6:.3f} MB backward, per micro-batch of rows that are one document each, in each layer of 0-1\n"
    )
    assert told in run("explain", shared).out
    lines = explained(shared)["context_parallel"]
    assert [line["pipeline"] for line in lines] == [0, 1]
    assert lines[0] | {"pipeline": 1} == lines[1]
    assert [line["pipeline"] for line in explained(shared, "--rank", "2")["context_parallel"]] == [1]


def test_zero_1_tells_how_parameters_come_back(shared: str) -> None:
    assert "parameters back" not in run("explain", shared).out
    shown = run("explain", shared, "--set", "strategy.zero=1").out
    assert "gradients (FP32) and parameters back from cut optimizer states, per step; " in shown
    reshards = {each["name"]: each for each in explained(shared, "--set", "strategy.zero=1")["reshards"]}
    head = reshards["head.weight"]
    assert (set(head["operators"]), set(head["backward_operators"])) == ({"RS"}, {"AG"})
    assert head["bytes"] == head["backward_bytes"] > 0


def test_what_is_recomputed_is_said_to_be_sent_again(shared: str) -> None:
    told = "what is recomputed is sent once more in the backward pass"
    assert told not in run("explain", shared).out
    assert told in run("explain", shared, "--set", "strategy.recompute=full").out
