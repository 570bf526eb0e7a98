"""The convergence check of the paper's Appendix B at small scale: two layouts and one device on the same corpus.

    python benchmarks/convergence/run.py [--png docs/convergence.png] [--set training.train_iters=50]

Trains the three recipes beside this file one after another, prints by how much the losses of the layouts differ from
those of one device, and draws the curves. Needs matplotlib (`pip install -e '.[plots]'`).
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from ruamel.yaml import YAML

HERE = Path(__file__).parent
CURVES = {
    "one_device": "one device",
    "c1_like": "like C1: TP2>TP2 + TP2>TP2",
    "c2_like": "like C2: TP2>TP2 + TP2>TP1",
}


def train(name: str, changes: list[str]) -> list[float]:
    recipe = HERE / f"{name}.yaml"
    subprocess.run([sys.executable, "-m", "hetero_megatron", "pretrain", str(recipe), *changes], check=True)
    folder = Path(YAML(typ="safe").load(recipe)["output"])
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def draw(losses: dict[str, list[float]], warm_up: int, png: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, apart) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1), layout="constrained"
    )
    steps = range(1, len(losses["one_device"]) + 1)
    for (name, label), style in zip(CURVES.items(), ("-", "--", ":"), strict=True):
        curves.plot(steps, losses[name], style, label=label, linewidth=1.6)
    curves.set_ylabel("loss per byte")
    curves.legend()
    curves.set_title("Same corpus, same seed, three layouts")
    for name, style in (("c1_like", "--"), ("c2_like", ":")):
        apart.plot(steps, differences(losses, name), style, color={"c1_like": "C1", "c2_like": "C2"}[name])
    apart.axvline(warm_up, color="grey", linewidth=0.8)
    apart.annotate(
        "end of warm-up", (warm_up, 0), xytext=(4, 4), textcoords="offset points", color="grey", fontsize=8
    )
    apart.set_ylabel("difference to\none device, %")
    apart.set_xlabel("step")
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, dpi=120)


def differences(losses: dict[str, list[float]], name: str) -> list[float]:
    return [100 * (a / b - 1) for a, b in zip(losses[name], losses["one_device"], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--png", type=Path, default=Path("docs/convergence.png"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    losses = {name: train(name, arguments.set) for name in CURVES}
    warm_up = YAML(typ="safe").load(HERE / "one_device.yaml")["training"]["lr_warmup_iters"]
    for name in ("c1_like", "c2_like"):
        found = [abs(each) for each in differences(losses, name)]
        print(
            f"{CURVES[name]}: largest difference to one device after warm-up {max(found[warm_up:], default=0):.4f}%, "
            f"at any step {max(found):.4f}%; last loss {losses[name][-1]:.5f}, one device {losses['one_device'][-1]:.5f}"
        )
    draw(losses, warm_up, arguments.png)
    print(f"drawn: {arguments.png}")


if __name__ == "__main__":
    main()
