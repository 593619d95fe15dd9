"""Draw ``logs/loss.csv`` as ``logs/loss.svg``. Usage: ``python plot.py``."""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt


def main() -> None:
    """Command line entry point."""
    folder = Path(__file__).resolve().parent / "logs"
    with open(folder / "loss.csv") as file:
        rows = list(csv.DictReader(file))
    tokens = [int(r["tokens"]) / 1e6 for r in rows]
    figure, axis = plt.subplots(figsize=(7, 4))
    axis.plot(tokens, [float(r["loss"]) for r in rows], linewidth=0.8)
    axis.set(xlabel="million tokens", ylabel="training loss (nats per token)", ylim=(1.7, 4.0), title="k3-nano")
    rate = axis.twinx()
    rate.plot(tokens, [float(r["lr_factor"]) for r in rows], color="grey", linestyle="--", linewidth=0.8)
    rate.set(ylabel="learning-rate factor (dashed)", ylim=(0, 1.05))
    figure.tight_layout()
    figure.savefig(folder / "loss.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
