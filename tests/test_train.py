"""The trainer's metrics: what a step says of itself in JSON."""

import json

from hetero_megatron.runtime.session import StepResult
from hetero_megatron.train import _metric

SECONDS = {"step": 0.5, "compute": 0.3, "communication": 0.1, "bubble": 0.1}


def test_a_skipped_step_with_a_norm_that_is_not_finite_is_valid_json() -> None:
    result = StepResult(
        3, 2.0, float("nan"), 1e-3, 10, "gradient not finite on rank 1 (head.weight)", SECONDS
    )
    line = json.loads(json.dumps(_metric(result), allow_nan=False))
    assert line["grad_norm"] is None
    assert line["loss"] == 2.0
    assert line["skipped"] == "gradient not finite on rank 1 (head.weight)"
