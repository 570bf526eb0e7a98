"""The errors of the library: one type per room, all of them `HeteroError`."""


class HeteroError(ValueError):
    """A refusal that names the object, what is wrong with the numbers, and what would be right."""


class AnnotationError(HeteroError):
    """A sharding annotation that contradicts itself (`annotation/`)."""


class ClusterError(HeteroError):
    """A device or link that the cluster does not have (`cluster.py`)."""


class ReshardError(HeteroError):
    """A change of layout that no communication can carry out (`comm/`)."""


class GraphError(HeteroError):
    """A model or a set of annotations from which no consistent graph follows (`graph/`)."""


class ScheduleError(HeteroError):
    """A pipeline schedule that is incomplete, inconsistent or would hang (`pipeline/`)."""


class StrategyError(HeteroError):
    """A parallel strategy that does not fit the model or the ranks (`strategy.py`)."""


class RuntimeFailure(HeteroError):
    """A failure while ranks are running: a lost peer, a disagreement, a wrong size (`runtime/`)."""


class CheckpointError(HeteroError):
    """A checkpoint that is missing, damaged, of another model, or cannot be written (`runtime/checkpoint*.py`)."""


class LayerError(HeteroError):
    """A layer that was given sizes or a binding it cannot work with (`layers/`)."""


class ModelError(HeteroError):
    """A model configuration that describes no model (`models/`)."""


class DataError(HeteroError):
    """A corpus, document or token that cannot be used (`data/`)."""


class PlannerError(HeteroError):
    """A planning problem without an answer (`planner/`)."""


class RecipeError(HeteroError):
    """A recipe file with a wrong key, type or value (`recipe.py`)."""
