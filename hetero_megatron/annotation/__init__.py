"""Sharding annotations, basic and hierarchical (paper §4)."""

from hetero_megatron.annotation.annotation import Annotation
from hetero_megatron.annotation.device_group import DeviceGroup
from hetero_megatron.annotation.plan import AnnotationPlan
from hetero_megatron.annotation.region import FULL, Region
from hetero_megatron.annotation.states import DUPLICATE, PARTIAL, DistributedStates

__all__ = [
    "DUPLICATE",
    "FULL",
    "PARTIAL",
    "Annotation",
    "AnnotationPlan",
    "DeviceGroup",
    "DistributedStates",
    "Region",
]
