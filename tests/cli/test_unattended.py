"""A long run on real text that is killed and goes on, three times, under another strategy each time.

`pytest -m fuzz` makes 200 steps, as long as it takes; without it there are 72.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from tests.whole import all_are_asked_for

MODEL = """
model: {preset: llama_tiny, num_layers: 4, hidden_size: 32, ffn_hidden_size: 64, num_query_groups: 4}
training: {train_iters: STEPS, global_batch_size: 4, seq_length: 256, lr: 1e-3, lr_decay_style: cosine, lr_warmup_iters: 20}
checkpoint: {interval: 10, keep_last: 2}
"""
UNEVEN = """
strategy:
  pipelines:
  - {micro_batches: 2, micro_batch_size: 2, stages: [{ranks: 0-1, layers: 0-2}, {ranks: 2, layers: 3}]}
  - {micro_batches: 1, micro_batch_size: 1, stages: [{ranks: 3, layers: 0-3}]}
"""
STRATEGIES = {
    "one": "strategy: {micro_batches: 4, micro_batch_size: 1}",
    "uneven": UNEVEN,
    "square": "strategy: {tp: 2, pp: 2, micro_batches: 4, micro_batch_size: 1}",
    "copies": "strategy: {dp: 4, zero: 1, micro_batches: 1, micro_batch_size: 2}",
}


def start(recipe: Path, folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "hetero_megatron", "pretrain", str(recipe), f"output={folder}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def metrics(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


@pytest.mark.timeout(300)
@pytest.mark.fuzz
def test_a_run_killed_three_times_and_resumed_under_three_strategies(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    steps = 200 if all_are_asked_for(pytestconfig) else 72
    texts = tmp_path / "texts"
    texts.mkdir()
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.glob("*.py"))[::2]:
        shutil.copy(path, texts)
    recipes = {}
    for name, strategy in STRATEGIES.items():
        recipes[name] = tmp_path / f"{name}.yaml"
        recipes[name].write_text(
            f"{MODEL.replace('STEPS', str(steps))}{strategy}\ndata: {{folder: {texts}, packing: documents}}\n"
        )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    process = start(recipes["one"], whole)
    assert process.communicate(timeout=200)[1] == ""
    for turn, name in enumerate(("uneven", "square", "copies", "uneven")):
        process = start(recipes[name], broken)
        try:
            while turn < 3 and len(metrics(broken)) < steps * (turn + 1) * 2 // 9:
                assert process.poll() is None, process.communicate()
                time.sleep(0.02)
            if turn < 3:
                process.send_signal(signal.SIGKILL)
            _, err = process.communicate(timeout=200)
            assert turn < 3 or (process.returncode, err) == (0, "")
        finally:
            process.kill()
            process.communicate()
    found, wanted = metrics(broken), metrics(whole)
    assert [line["iteration"] for line in found] == list(range(1, steps + 1))
    seen = [n for line in found for n in range(int(line["first_sample"]), int(line["consumed_samples"]))]
    assert seen == list(range(len(seen))), "every sample once, in order"
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours["first_sample"] == theirs["first_sample"]
        assert ours["valid_tokens"] == theirs["valid_tokens"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5), ours["iteration"]
        assert ours["lr"] == theirs["lr"]
