"""AnnotationPlan: JSON both ways, and what is refused (paper §3, §8)."""

import json
import re

import pytest

from hetero_megatron.annotation import Annotation, AnnotationPlan, DeviceGroup, DistributedStates
from hetero_megatron.errors import AnnotationError

ENTRY = {"groups": [[0, 1]], "states": [[[0, 2]]], "hdim": -1}


def text(entry: object = ENTRY, **top: object) -> str:
    return json.dumps({"version": 1, "annotations": {"w": entry}} | top)


def test_a_plan_survives_json_with_names_and_orders_in_place() -> None:
    union = Annotation(
        (DeviceGroup((3, 0)), DeviceGroup((1, 2, 4, 5))),
        (DistributedStates.of({0: 2}), DistributedStates.of({1: 2, -1: 2})),
        -2,
    )
    plan = AnnotationPlan({"z": union, "a": Annotation.on((7,))})
    again = AnnotationPlan.from_json(plan.to_json())
    assert dict(again) == {"z": union, "a": Annotation.on((7,))}
    assert (list(again), len(again), again["z"]) == (["z", "a"], 2, union)
    assert json.loads(plan.to_json())["annotations"]["z"] == {
        "groups": [[3, 0], [1, 2, 4, 5]],
        "states": [[[0, 2]], [[1, 2], [-1, 2]]],
        "hdim": -2,
    }


REFUSED = [
    ("{", "plan is not JSON: line 1"),
    ("[]", "plan must be an object, found list"),
    (text(version=2), "plan.version is 2, this library reads version 1"),
    ('{"version": 1}', "plan.annotations is missing"),
    (text(anotations={}), "plan.anotations is unknown; did you mean 'annotations'?"),
    (text(xyz={}), "plan.xyz is unknown; known: ('version', 'annotations')"),
    ('{"version": 1, "version": 1, "annotations": {}}', "plan: key 'version' stands twice in one object"),
    (text(annotations=[]), "annotations must be an object, found list"),
    (text([]), "annotations.w must be an object, found list"),
    (text(ENTRY | {"hdims": 0}), "annotations.w.hdims is unknown; did you mean 'hdim'?"),
    (text({"groups": [[0]], "states": [[]]}), "annotations.w.hdim is missing"),
    (text(ENTRY | {"hdim": "0"}), "annotations.w.hdim must be a whole number, found '0' (duplicate is -1)"),
    (text(ENTRY | {"hdim": True}), "annotations.w.hdim must be a whole number, found True"),
    (text(ENTRY | {"groups": 3}), "annotations.w.groups must be a list, found 3"),
    (text(ENTRY | {"groups": [[0, 1.5]]}), "annotations.w.groups[0][1] must be a whole number, found 1.5"),
    (text(ENTRY | {"states": [[[0]]]}), "annotations.w: not enough values to unpack"),
    (text(ENTRY | {"states": [[[0, 3]]]}), "annotations.w: subgroup 0: states {0: 3} cover 3 devices"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_wrong_plan_is_refused_with_its_path(body: str, message: str) -> None:
    with pytest.raises(AnnotationError, match=re.escape(message)):
        AnnotationPlan.from_json(body)
