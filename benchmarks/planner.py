"""CPU seconds of planning: 48 devices, replanning after losses, 1,024 devices of four kinds (paper §9, A.1).

    OMP_NUM_THREADS=1 python benchmarks/planner.py [--json] [--only plan,replan,large]

Each line: what was planned, CPU seconds of this process, the limit, the predicted step and its distance to the bound.
One core, no profile: published figures. Limits: 6 s for 32B and 70B on 16 H800 + 32 H20, 0.2 s to plan on after a loss,
60 s on 1,024 devices.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from hetero_megatron.cluster import Cluster
from hetero_megatron.models.presets import PRESETS
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.plan import Plan, make_plan
from hetero_megatron.planner.problem import Choices, Problem
from hetero_megatron.planner.replan import replan

PAPER = {"h800": 2, "h20": 4}
LARGE = {"h800": 32, "h20": 32, "a100-80": 32, "v100-32": 32}
LOSSES = ((15,), (14, 15), tuple(range(40, 48)), tuple(range(8, 16)), (0,))
PLAN, REPLAN, MANY = 6.0, 0.2, 60.0


@dataclass(frozen=True)
class Timed:
    """One planning: CPU seconds, what they should be at most, and what came out."""

    name: str
    cpu_seconds: float
    limit: float
    step_seconds: float
    gap: float


def planned(model: str, nodes: dict[str, int], batch: int, choices: Choices | None = None) -> Plan:
    """The plan for a model on nodes of eight, rows of 4096 tokens."""
    cluster = Cluster.of_nodes(nodes)
    problem = Problem(PRESETS[model], cluster, batch, 4096, choices or Choices())
    return make_plan(problem, Costs(problem.config, cluster))


def plans() -> list[Timed]:
    """Offline plans on the paper's 48 devices."""
    found = []
    for model in ("llama_32b", "llama_70b"):
        began = time.process_time()
        plan = planned(model, PAPER, 64)
        took = time.process_time() - began
        found.append(Timed(f"{model}, 16 H800 + 32 H20", took, PLAN, plan.best.seconds, plan.gap))
    return found


def replans() -> list[Timed]:
    """After losses, on the plan that stays trainable: two pipelines, no ZeRO."""
    plan = planned("llama_32b", PAPER, 64, Choices(zero=(0,), pipelines=(2,)))
    found = []
    for lost in LOSSES:
        began = time.process_time()
        after = replan(plan, lost)
        took = time.process_time() - began
        found.append(
            Timed(
                f"llama_32b without {len(lost)} of 48 (first {lost[0]})",
                took,
                REPLAN,
                after.best.seconds,
                after.best.seconds / plan.best.seconds - 1,
            )
        )
    return found


def large() -> list[Timed]:
    """1,024 devices of four kinds."""
    began = time.process_time()
    plan = planned("llama_70b", LARGE, 1024)
    took = time.process_time() - began
    return [Timed("llama_70b, 1,024 devices of 4 kinds", took, MANY, plan.best.seconds, plan.gap)]


PARTS: dict[str, Callable[[], list[Timed]]] = {"plan": plans, "replan": replans, "large": large}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), help="parts: " + ", ".join(PARTS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = []
    for part in options.only.split(","):
        for each in PARTS[part]():
            found.append(each)
            if not options.json:
                note = "longer than before" if part == "replan" else "above the bound"
                print(
                    f"{each.name:42s} {each.cpu_seconds:7.3f} CPU s (limit {each.limit:g}), step "
                    f"{each.step_seconds:.3f} s, {100 * each.gap:.1f}% {note}",
                    flush=True,
                )
    if options.json:
        print(json.dumps([asdict(each) for each in found], indent=1))


if __name__ == "__main__":
    main()
