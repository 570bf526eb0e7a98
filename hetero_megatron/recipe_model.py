"""The `model` section of a recipe: a preset, sizes, or a Hugging Face config.json, and weights to start from."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, BeforeValidator, create_model, model_validator

from hetero_megatron.errors import ModelError, RecipeError
from hetero_megatron.layers.rope_scaling import RopeScaling
from hetero_megatron.models.config import WITHOUT_EFFECT, LlamaConfig, differences
from hetero_megatron.models.hf_config import CONFIG_FILE, config_file, read_hf_config
from hetero_megatron.models.presets import PRESETS
from hetero_megatron.recipe_refusals import nearest
from hetero_megatron.recipe_sections import Section


def _rope_scaling(value: object) -> RopeScaling | None:
    try:
        return None if value is None else RopeScaling.read(value)
    except ModelError as error:
        raise RecipeError(str(error).removeprefix("rope_scaling: ")) from error


class ModelBase(Section):
    """`preset` or `config`, every field of LlamaConfig, and `weights`; all optional.

    What is given replaces the preset's value. `config` is the path of a Hugging Face config.json, or of the folder
    with one; what is given beside it must agree with it, but for `init_std` and `max_position_embeddings`.
    `weights` is a Hugging Face folder whose weights the run starts from; alone, it is the `config` too. Paths are
    relative to the folder in which the command runs.
    """

    @model_validator(mode="before")
    @classmethod
    def _path_or_preset(cls, value: object) -> object:
        """`model: path/to/folder` arrives as the name of a preset."""
        if isinstance(value, Mapping) and _is_path(value.get("preset")) and "config" not in value:
            return {"config" if key == "preset" else key: each for key, each in value.items()}
        return value


def _is_path(name: object) -> bool:
    if not isinstance(name, str) or name in PRESETS:
        return False
    return "/" in name or name.endswith(".json") or (Path(name) / CONFIG_FILE).exists()


def _model_section() -> type[ModelBase]:
    hints = get_type_hints(LlamaConfig)
    hints["rope_scaling"] = Annotated[
        RopeScaling | None, BeforeValidator(_rope_scaling, json_schema_input_type=dict[str, Any] | None)
    ]
    fields: dict[str, Any] = {
        field.name: (hints[field.name], None) for field in dataclasses.fields(LlamaConfig)
    }
    text: Any = (str | None, None)
    return create_model("ModelSection", __base__=ModelBase, preset=text, config=text, weights=text, **fields)


ModelSection = _model_section()


def make_config(section: BaseModel) -> LlamaConfig:
    """The model that the section describes.

    Raises:
        RecipeError: the preset is unknown, a field is missing, or the section and a config.json contradict each other.
        ModelError: the fields, or the config.json, describe no model.
    """
    given = {name: getattr(section, name) for name in section.model_fields_set}
    preset, path, weights = (given.pop(name, None) for name in ("preset", "config", "weights"))
    if preset is not None and path is not None:
        raise RecipeError("model.preset and model.config both say what the model is; drop one of them")
    if preset is not None:
        config = dataclasses.replace(_preset(preset), **given)
    elif path is not None or (weights is not None and (not given or (Path(weights) / CONFIG_FILE).exists())):
        config = _agreeing(config_file(path or weights), given)
    else:
        config = _from_sizes(given)
    if weights is not None and (Path(weights) / CONFIG_FILE).exists():
        _agree(config, Path(weights) / CONFIG_FILE)
    return config


def _preset(name: str) -> LlamaConfig:
    if name not in PRESETS:
        near = nearest(name, PRESETS)
        guess = f"did you mean {near}?" if near else f"known: {', '.join(PRESETS)}"
        raise RecipeError(f"model.preset: there is no model {name!r}; {guess}")
    return PRESETS[name]


def _from_sizes(given: Mapping[str, Any]) -> LlamaConfig:
    for field in dataclasses.fields(LlamaConfig):
        default = (field.default, field.default_factory)
        if field.name not in given and default == (dataclasses.MISSING, dataclasses.MISSING):
            raise RecipeError(f"model.{field.name}: missing; give it, or name a preset")
    return LlamaConfig(**given)


def _agreeing(file: Path, given: Mapping[str, Any]) -> LlamaConfig:
    """The model of a config.json, with nothing beside it that contradicts it."""
    config = read_hf_config(file)
    _agree(dataclasses.replace(config, **given), file)
    return dataclasses.replace(config, **{name: given[name] for name in WITHOUT_EFFECT if name in given})


def _agree(config: LlamaConfig, file: Path) -> None:
    for name, (here, there) in differences(config, read_hf_config(file)).items():
        raise RecipeError(
            f"model.{name}: {here} here, and {there} in {file}; they contradict each other, drop one of them"
        )
