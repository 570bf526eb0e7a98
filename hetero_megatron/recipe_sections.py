"""The sections of a recipe, typed and strict: no unknown key, no text for a number (paper Tables 6, 9-16)."""

import sys
from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from hetero_megatron.errors import RecipeError, RuntimeFailure
from hetero_megatron.recipe_text import number_list
from hetero_megatron.runtime.learning_rate import check_schedule
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.state import BUCKET_ELEMENTS

Count = Annotated[int, Field(ge=1)]
Numbers: TypeAlias = int | str | list[int | str]
Ranks = Annotated[
    tuple[int, ...], Field(strict=False), BeforeValidator(number_list, json_schema_input_type=Numbers)
]


def refuse_unknown(keys: Mapping[object, object], known: Mapping[str, object]) -> None:
    """Refuse the first key that is not known; the message is made where the whole recipe is in view."""
    for key in keys:
        if key not in known:
            raise PydanticCustomError("unknown_key", "unknown key", {"key": key, "known": list(known)})


class Section(BaseModel):
    """A mapping with known keys and exact types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: object) -> object:
        if isinstance(value, Mapping):
            refuse_unknown(value, cls.model_fields)
        return value


class NodesSection(Section):
    """How many nodes of one kind of device, and devices in each."""

    nodes: Count
    devices_per_node: Count = 8


class SourceSection(Section):
    """One source of documents, and its share of the tokens beside other sources.

    `path` is a folder of files, one document each; a .json, .jsonl, .parquet or .txt file (the latter with a document
    per line), or a pattern such as `corpus/*.jsonl`; a folder that `datasets` has saved; the common prefix of a
    Megatron .bin/.idx pair; or the name of a dataset on the Hugging Face hub. `format` says which when the path does
    not tell.
    """

    path: str
    format: Literal["auto", "files", "json", "parquet", "text", "saved", "megatron", "hub"] = "auto"
    weight: Annotated[float, Field(gt=0)] = 1.0
    suffixes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    text_key: str = "text"
    split: str = "train"
    config: str | None = None
    stream: bool = False


class DataSection(Section):
    """Where documents come from, how they become tokens, and how tokens become samples.

    A folder, a list of files, a list of sources, or (none of them) the standard library's source files. Paths are
    relative to the folder in which the command runs.

    `tokenizer` is `byte`, a tokenizer.json or a Hugging Face folder with one, or a SentencePiece .model file.
    `bad_documents` says what happens to text that is missing, of another type or not UTF-8.
    `packing`: under `rows` a sample is seq_length tokens cut from the stream of all documents; under `documents` a
    sample is a document, and a step takes as many as fit into global_batch_size * seq_length tokens.
    `long_documents` says what happens to a document of more than seq_length tokens under `documents`.
    `last_batch`: the step at the end of a number of epochs that is not full is trained on, or dropped.
    `workers` processes per rank prepare up to `prefetch` steps each ahead; 0 prepares inside the step.
    `cache`: where tokenized text is kept; left out, `data` in the run's folder.
    `shuffle_buffer`: how many documents of a stream are put in random order together.
    """

    folder: str | None = None
    suffixes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    files: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    sources: Annotated[tuple[SourceSection, ...], Field(strict=False, min_length=1)] | None = None
    tokenizer: str = "byte"
    bad_documents: Literal["stop", "skip", "replace"] = "stop"
    packing: Literal["rows", "documents"] = "rows"
    long_documents: Literal["split", "truncate", "drop"] = "split"
    last_batch: Literal["keep", "drop"] = "keep"
    workers: Annotated[int, Field(ge=0)] = 1
    prefetch: Count = 2
    cache: str | None = None
    shuffle_buffer: Count = 1024

    @model_validator(mode="after")
    def _one_source(self) -> "DataSection":
        given = [name for name in ("folder", "files", "sources") if getattr(self, name) is not None]
        if len(given) > 1:
            raise RecipeError(f"{given[0]} and {given[1]} are both given; one of them is the corpus")
        if self.suffixes and self.folder is None:
            raise RecipeError("suffixes choose files in a folder; give folder too")
        return self


class TrainingSection(Section):
    """How long, how much, how fast; names and defaults are Megatron's.

    Either `train_iters` steps, or as many steps as `train_epochs` passes over the data take.
    `lr_decay_style`: after a linear warm-up of `lr_warmup_iters` steps the rate stays (`constant`), or falls to
    `min_lr` until step `lr_decay_iters` (left out: the last one): all the way, or under `WSD` in the last
    `lr_wsd_decay_iters` of these steps, by `lr_wsd_decay_style`.
    `nonfinite`: a step whose loss or gradient is not finite ends the run, or is skipped; `nonfinite_limit` such steps in
    a row end it, too.
    `bucket_size`: gradients and parameters travel in buckets of about this many elements of the full tensors.
    """

    train_iters: Count | None = None
    train_epochs: Annotated[float, Field(gt=0)] | None = None
    global_batch_size: Count
    seq_length: Count
    lr: Annotated[float, Field(ge=0)]
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD"] = "constant"
    lr_decay_iters: Count | None = None
    lr_wsd_decay_iters: Count | None = None
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    lr_warmup_iters: Annotated[int, Field(ge=0)] = 0
    optimizer: Literal["adam", "sgd"] = "adam"
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    clip_grad: Annotated[float, Field(ge=0)] | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    nonfinite: Literal["skip", "stop"] = "stop"
    nonfinite_limit: Count = 10
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1234
    log_interval: Count = 10
    bucket_size: Count = BUCKET_ELEMENTS

    @field_validator("clip_grad")
    @classmethod
    def _zero_is_off(cls, value: float | None) -> float | None:
        return value or None

    @model_validator(mode="after")
    def _consistent(self) -> "TrainingSection":
        if (self.train_iters is None) == (self.train_epochs is None):
            raise RecipeError("give train_iters or train_epochs, one of the two: how long the run is")
        # How many steps train_epochs are is known when the data is: until then all but the length is checked.
        self.optimizer_settings(self.train_iters or sys.maxsize)
        return self

    def optimizer_settings(self, train_iters: int) -> OptimizerSettings:
        """Optimizer and schedule of a run of `train_iters` steps, which only the data knows under `train_epochs`.

        Raises:
            RecipeError: the parts of the schedule do not fit into each other or into the run.
        """
        settings = OptimizerSettings(
            name=self.optimizer,
            lr=self.lr,
            min_lr=self.min_lr,
            lr_decay_style=self.lr_decay_style,
            lr_warmup_iters=self.lr_warmup_iters,
            train_iters=train_iters,
            beta1=self.adam_beta1,
            beta2=self.adam_beta2,
            eps=self.adam_eps,
            weight_decay=self.weight_decay,
            clip_grad=self.clip_grad,
            lr_decay_iters=self.lr_decay_iters,
            lr_wsd_decay_iters=self.lr_wsd_decay_iters,
            lr_wsd_decay_style=self.lr_wsd_decay_style,
        )
        try:
            check_schedule(settings)
        except RuntimeFailure as error:
            raise RecipeError(str(error)) from error
        return settings


class KernelsSection(Section):
    """Which kernel computes each operator: `auto` takes the first that is installed and fits device and dtype."""

    attention: Literal["auto", "flash-attn", "transformer-engine", "torch-varlen", "torch-sdpa"] = "auto"
    rms_norm: Literal["auto", "transformer-engine", "apex", "torch"] = "auto"
    cross_entropy: Literal["auto", "torch"] = "auto"
    adam: Literal["auto", "transformer-engine", "apex", "torch"] = "auto"


class EvaluationSection(Section):
    """A held-out corpus, and how often and on how much of it the loss is measured (sections as in `data`).

    `data.tokenizer`, left out, is that of the recipe's `data`.
    Every `interval` steps, and after the last one, the loss of the same first `iters` batches is measured.
    """

    data: DataSection
    interval: Count = 100
    iters: Count = 10


class CheckpointSection(Section):
    """When and where states are saved, and from which one a run starts.

    `interval`: a save every so many steps and after the last; left out, only after the last and on SIGTERM or SIGINT.
    `keep_last`: how many finished checkpoints stay. `asynchronous`: files are written while training goes on.
    `resume`: `auto` goes on from the newest complete checkpoint in the run's folder, if there is one; `never` starts
    anew and refuses a folder with checkpoints; a number is the iteration to go on from, each time the command is run.
    `load`: another run's folder to start from when this run's folder has no checkpoint.
    `override_lr_schedule`: a resumed run takes the learning-rate schedule of the recipe, not the saved one.
    `new_data`: a resumed run may have other data than its checkpoint, and then goes through them from the first sample;
    once a checkpoint of the new data is there, it goes on from where that one stands.
    """

    interval: Count | None = None
    keep_last: Count = 3
    asynchronous: bool = True
    resume: Literal["auto", "never"] | Annotated[int, Field(ge=0)] = "auto"
    load: str | None = None
    override_lr_schedule: bool = False
    new_data: bool = False


class LoggingSection(Section):
    """Where metrics go besides `metrics.jsonl`, and when a loss counts as a spike.

    `wandb` is the project's name. `spike_factor`: a loss of more than this many times the running median is noted.
    `trace`: a file for what every rank does in `trace_steps`, which count from the first step that a command makes.
    """

    tensorboard: bool = False
    wandb: str | None = None
    spike_factor: Annotated[float, Field(gt=1)] = 1.5
    trace: str | None = None
    trace_steps: Annotated[Ranks, Field(min_length=1)] = (2, 3, 4)

    @field_validator("trace_steps")
    @classmethod
    def _count_from_one(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if min(value) < 1:
            raise RecipeError("steps count from 1, the first that a command makes")
        return value


class PlanningSection(Section):
    """What the planner goes by: for `strategy: auto`, among several strategies, after a loss, about slow ranks.

    `profile`: a file with times that `profile` has measured, in place of published figures.
    """

    profile: str | None = None


class OutputSection(Section):
    """The run's folder, relative to the folder in which the command runs."""

    folder: str = "runs/latest"
