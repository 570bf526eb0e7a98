"""What the paper prints of strategies, as facts of the tests' own (paper Tables 6, 8-16)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

COUNTS_NOT_PRINTED = ""


@dataclass(frozen=True, slots=True)
class Printed:
    """A strategy of Tables 9, 11, 12, 15 and 16: pipelines as (`32 x bs1`, `R0-3:L0-14 ...`)."""

    model: str
    zero: int
    devices: str
    pipelines: tuple[tuple[str, str], ...]


PRINTED: Mapping[str, Printed] = {
    "table9_32b_16h800_16h20": Printed(
        "llama_32b",
        1,
        "16 H800, 16 H20",
        (
            ("32 x bs1", "R16-19:L0-6 R20-23:L7-13 R0-3:L14-36 R4-7:L37-59"),
            ("32 x bs1", "R24-27:L0-6 R28-31:L7-13 R8-11:L14-36 R12-15:L37-59"),
        ),
    ),
    "table9_32b_16h800_24h20": Printed(
        "llama_32b",
        1,
        "16 H800, 24 H20",
        (
            ("32 x bs1", "R16-19:L0-5 R20-23:L6-11 R24-27:L12-17 R0-3:L18-38 R4-7:L39-59"),
            ("32 x bs1", "R28-31:L0-5 R32-35:L6-11 R36-39:L12-17 R8-11:L18-38 R12-15:L39-59"),
        ),
    ),
    "table9_32b_16h800_32h20": Printed(
        "llama_32b",
        1,
        "16 H800, 32 H20",
        (
            ("16 x bs1", "R16-19:L0-10 R20-23:L11-21 R0-3:L22-59"),
            ("16 x bs1", "R24-27:L0-10 R28-31:L11-21 R4-7:L22-59"),
            ("16 x bs1", "R32-35:L0-10 R36-39:L11-21 R8-11:L22-59"),
            ("16 x bs1", "R40-43:L0-10 R44-47:L11-21 R12-15:L22-59"),
        ),
    ),
    "table9_70b_16h800_16h20": Printed(
        "llama_70b",
        1,
        "16 H800, 16 H20",
        (("64 x bs1", "R16-23:L0-10 R24-31:L11-21 R0-7:L22-50 R8-15:L51-79"),),
    ),
    "table9_70b_16h800_24h20": Printed(
        "llama_70b",
        1,
        "16 H800, 24 H20",
        (("64 x bs1", "R16-23:L0-9 R24-31:L10-19 R32-39:L20-29 R0-7:L30-54 R8-15:L55-79"),),
    ),
    "table9_70b_16h800_32h20": Printed(
        "llama_70b",
        1,
        "16 H800, 32 H20",
        (
            ("32 x bs1", "R16-23:L0-16 R24-31:L17-33 R0-7:L34-79"),
            ("32 x bs1", "R32-39:L0-16 R40-47:L17-33 R8-15:L34-79"),
        ),
    ),
    "c1": Printed(
        "llama_32b",
        0,
        "32 H20",
        (
            ("16 x bs2", "R0-3:L0-14 R4-7:L15-29 R8-11:L30-44 R12-15:L45-59"),
            ("16 x bs2", "R16-19:L0-14 R20-23:L15-29 R24-27:L30-44 R28-31:L45-59"),
        ),
    ),
    "c2": Printed(
        "llama_32b",
        0,
        "31 H20",
        (
            ("33 x bs1", "R0-3:L0-14 R4-7:L15-29 R8-11:L30-44 R12-15:L45-59"),
            ("31 x bs1", "R16-19:L0-15 R20-23:L16-31 R24-27:L32-47 R28-29:L48-55 R30:L56-59"),
        ),
    ),
    "c3": Printed(
        "llama_32b",
        0,
        "24 H20",
        (
            ("32 x bs1", "R0-3:L0-19 R4-7:L20-39 R8-11:L40-59"),
            ("32 x bs1", "R12-15:L0-19 R16-19:L20-39 R20-23:L40-59"),
        ),
    ),
    "c4": Printed(
        "llama_32b",
        0,
        "16 H800, 32 H20",
        (
            ("32 x bs1", "R16-19:L0-4 R20-23:L5-10 R24-27:L11-16 R28-31:L17-22 R0-3:L23-40 R4-7:L41-59"),
            ("32 x bs1", "R32-35:L0-4 R36-39:L5-10 R40-43:L11-16 R44-47:L17-22 R8-11:L23-40 R12-15:L41-59"),
        ),
    ),
    "c5": Printed(
        "llama_32b",
        0,
        "16 H800, 24 H20",
        (
            ("32 x bs1", "R16-19:L0-5 R20-23:L6-11 R24-27:L12-17 R0-3:L18-38 R4-7:L39-59"),
            ("32 x bs1", "R28-31:L0-5 R32-35:L6-11 R36-39:L12-17 R8-11:L18-38 R12-15:L39-59"),
        ),
    ),
    "c6": Printed(
        "llama_32b",
        0,
        "15 H800, 24 H20",
        (
            ("33 x bs1", "R16-19:L0-5 R20-23:L6-11 R24-27:L12-17 R0-3:L18-38 R4-7:L39-59"),
            ("31 x bs1", "R28-31:L0-5 R32-35:L6-11 R36-39:L12-17 R8-11:L18-39 R12-13:L40-52 R14:L53-59"),
        ),
    ),
    "c7": Printed(
        "llama_32b",
        0,
        "8 H800, 24 H20",
        (
            ("32 x bs1", "R16-19:L0-8 R20-23:L9-18 R24-27:L19-28 R0-3:L29-59"),
            ("32 x bs1", "R28-31:L0-8 R32-35:L9-18 R36-39:L19-28 R4-7:L29-59"),
        ),
    ),
    "table15_a": Printed(
        "llama_32b",
        1,
        "32 H20",
        (
            (COUNTS_NOT_PRINTED, "R0-15:L0-59"),
            (COUNTS_NOT_PRINTED, "R16-19:L0-59"),
            (COUNTS_NOT_PRINTED, "R20-23:L0-59"),
            (COUNTS_NOT_PRINTED, "R24-27:L0-59"),
            (COUNTS_NOT_PRINTED, "R28-31:L0-59"),
        ),
    ),
    "table15_b": Printed(
        "llama_32b",
        1,
        "32 H20",
        (
            (COUNTS_NOT_PRINTED, "R0-7:L0-59"),
            (COUNTS_NOT_PRINTED, "R8-11:L0-29 R12-15:L30-59"),
            (COUNTS_NOT_PRINTED, "R16-19:L0-29 R20-23:L30-59"),
            (COUNTS_NOT_PRINTED, "R24-27:L0-29 R28-31:L30-59"),
        ),
    ),
    "table16_a": Printed(
        "llama_32b",
        1,
        "32 H20",
        (
            (COUNTS_NOT_PRINTED, "R0-7:L0-59"),
            (COUNTS_NOT_PRINTED, "R8-11:L0-29 R12-15:L30-59"),
            (COUNTS_NOT_PRINTED, "R16-19:L0-29 R20-23:L30-59"),
            (COUNTS_NOT_PRINTED, "R24-27:L0-29 R28-31:L30-59"),
        ),
    ),
}

# Ranks of the cluster that do no work: the failed ones and those of nodes that are gone.
IDLE: Mapping[str, tuple[int, ...]] = {
    "c2": (31,),
    "c3": tuple(range(24, 32)),
    "c5": tuple(range(40, 48)),
    "c6": (15, *range(40, 48)),
    "c7": (*range(8, 16), *range(40, 48)),
}


@dataclass(frozen=True, slots=True)
class Degrees:
    """A row of Tables 8, 10, 13 or 14, such as `DP2TP4PP4, bs2`, and on what it runs."""

    model: str
    devices: str
    text: str
    sequences: int = 64
    seq_length: int = 4096

    def degree(self, letters: str) -> int:
        """The number after `DP`, `TP`, `PP`, `CP` or `SP`; 1 when it is not there."""
        found = re.search(rf"{letters}(\d+)", self.text)
        return int(found[1]) if found else 1

    @property
    def micro_batch_size(self) -> int:
        return int(self.text.split("bs")[1])


MEGATRON: Mapping[str, Degrees] = {
    "megatron_table8_32b_16h800": Degrees("llama_32b", "16 H800", "TP4PP4, bs1"),
    "megatron_table8_32b_16h20": Degrees("llama_32b", "16 H20", "TP4PP4, bs1"),
    "megatron_table8_32b_16h800_16h20": Degrees("llama_32b", "16 H800, 16 H20", "DP2TP4PP4, bs2"),
    "megatron_table8_32b_16h800_24h20": Degrees("llama_32b", "16 H800, 24 H20", "DP2TP4PP5, bs2"),
    # Also Table 10, C4.
    "megatron_table8_32b_16h800_32h20": Degrees("llama_32b", "16 H800, 32 H20", "DP4TP4PP3, bs2"),
    "megatron_table8_70b_16h800_16h20": Degrees("llama_70b", "16 H800, 16 H20", "TP8PP4, bs1"),
    "megatron_table8_70b_16h800_24h20": Degrees("llama_70b", "16 H800, 24 H20", "TP8PP5, bs1"),
    "megatron_table8_70b_16h800_32h20": Degrees("llama_70b", "16 H800, 32 H20", "TP8PP6, bs1"),
    "megatron_table10_c1": Degrees("llama_32b", "32 H20", "DP2TP4PP4, bs2"),
    # Also C2.
    "megatron_table10_c3": Degrees("llama_32b", "24 H20", "TP4PP6, bs1"),
    "megatron_table10_c5": Degrees("llama_32b", "16 H800, 24 H20", "TP8PP5, bs1"),
    # Also C6.
    "megatron_table10_c7": Degrees("llama_32b", "8 H800, 24 H20", "DP2TP4PP4, bs2"),
    "megatron_table13_32k": Degrees("llama_32b", "32 H20", "DP2TP8CP2, bs1", 6, 32768),
    "megatron_table13_16k": Degrees("llama_32b", "32 H20", "TP8PP4, bs1", 12, 16384),
}
DEEPSPEED: Mapping[str, Degrees] = {
    "deepspeed_table8_32b_16h800": Degrees("llama_32b", "16 H800", "DP8SP2AC, bs2"),
    "deepspeed_table8_32b_16h20": Degrees("llama_32b", "16 H20", "DP8SP2AC, bs2"),
    "deepspeed_table8_32b_16h800_16h20": Degrees("llama_32b", "16 H800, 16 H20", "DP16SP2AC, bs2"),
    "deepspeed_table8_32b_16h800_24h20": Degrees("llama_32b", "16 H800, 24 H20", "DP20SP2AC, bs4"),
    # Also Table 10, C4.
    "deepspeed_table8_32b_16h800_32h20": Degrees("llama_32b", "16 H800, 32 H20", "DP24SP2AC, bs1"),
    "deepspeed_table8_70b_16h800_16h20": Degrees("llama_70b", "16 H800, 16 H20", "DP16SP2AC, bs1"),
    "deepspeed_table8_70b_16h800_24h20": Degrees("llama_70b", "16 H800, 24 H20", "DP20SP2AC, bs2"),
    "deepspeed_table8_70b_16h800_32h20": Degrees("llama_70b", "16 H800, 32 H20", "DP24SP2AC, bs1"),
    "deepspeed_table10_c1": Degrees("llama_32b", "32 H20", "DP16SP2AC, bs2"),
    # Also C2.
    "deepspeed_table10_c3": Degrees("llama_32b", "24 H20", "DP12SP2AC, bs2"),
    "deepspeed_table10_c5": Degrees("llama_32b", "16 H800, 24 H20", "DP20SP2AC, bs2"),
    # Also C6.
    "deepspeed_table10_c7": Degrees("llama_32b", "8 H800, 24 H20", "DP16SP2AC, bs2"),
    "deepspeed_table13_32k": Degrees("llama_32b", "32 H20", "DP4SP8AC, bs1", 6, 32768),
    "deepspeed_table13_16k": Degrees("llama_32b", "32 H20", "DP8SP4AC, bs1", 12, 16384),
}
# Table 14, and the one homogeneous strategy of Table 16.
INTERVALS: Mapping[str, Degrees] = {
    "hotspa_table14_16k_32k": Degrees("llama_32b", "32 H20", "DP2TP16, bs1", 6, 32768),
    "hotspa_table14_4k_16k": Degrees("llama_32b", "32 H20", "DP2TP8PP2, bs1", 12, 16384),
    "hotspa_table14_0_4k": Degrees("llama_32b", "32 H20", "DP4TP4PP2, bs1", 48, 4096),
    "table16_b": Degrees("llama_32b", "32 H20", "DP4TP4PP2, bs1", 48, 4096),
}
