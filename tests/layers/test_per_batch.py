"""What is shared per micro-batch is made once, and made again for another one."""

import torch

from hetero_megatron.layers import PerBatch
from hetero_megatron.runtime.batch import Segments

CPU = torch.device("cpu")


def test_the_value_is_made_once_per_segments_object_and_dtype() -> None:
    made: list[torch.dtype] = []
    value: PerBatch[int] = PerBatch(lambda segments, device, dtype: made.append(dtype) or len(made))
    first, second = Segments.of_lengths((3,)), Segments.of_lengths((3,))
    assert [value(first, CPU, torch.float32), value(first, CPU, torch.float32)] == [1, 1]
    assert value(first, CPU, torch.bfloat16) == 2
    assert value(second, CPU, torch.bfloat16) == 3
