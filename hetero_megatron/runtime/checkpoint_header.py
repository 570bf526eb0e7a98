"""Everything of a checkpoint that is no tensor: `state.json`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero_megatron import __version__
from hetero_megatron.errors import CheckpointError
from hetero_megatron.runtime.checkpoint_files import STATE
from hetero_megatron.runtime.state import Shape

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Header:
    """Counters, what the tensors are, and the trainer's own values.

    Attributes:
        optimizer_step: updates made so far, which Adam's bias corrections count; steps that were skipped make none.
        kinds: which tensors there are of each parameter: `master` and perhaps the moments.
        shapes: global, by parameter name.
        payload: what the trainer wants back: data position, seed, recipe, strategy... (JSON values).
    """

    iteration: int
    optimizer_step: int
    skipped_iterations: int
    kinds: tuple[str, ...]
    shapes: Mapping[str, Shape]
    payload: Mapping[str, Any]

    def to_json(self) -> str:
        """The text of the file.

        Raises:
            CheckpointError: the payload holds something that JSON cannot say.
        """
        content = {
            "version": _VERSION,
            "written_by": {"hetero_megatron": __version__, "torch": torch.__version__},
            "iteration": self.iteration,
            "optimizer_step": self.optimizer_step,
            "skipped_iterations": self.skipped_iterations,
            "kinds": self.kinds,
            "payload": self.payload,
            "parameters": self.shapes,
        }
        try:
            return json.dumps(content, indent=1) + "\n"
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the payload of a checkpoint must be JSON values: {error}") from None

    @staticmethod
    def read(path: Path) -> "Header":
        """The header of the checkpoint folder `path`.

        Raises:
            CheckpointError: the file is missing, no JSON, or of another version.
        """
        file = path / STATE
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if content["version"] != _VERSION:
                raise CheckpointError(
                    f"{file} has version {content['version']}; this is for version {_VERSION}"
                )
            return Header(
                content["iteration"],
                content["optimizer_step"],
                content["skipped_iterations"],
                tuple(content["kinds"]),
                {name: tuple(shape) for name, shape in content["parameters"].items()},
                content["payload"],
            )
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} cannot be read: {type(error).__name__} {error}") from None
