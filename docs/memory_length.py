"""Draw bits per token against the length of the memory of one trained model: docs/figures/memory-length.svg.

    txl eval RUN --mem-len 0 8 16 32 64 128 256 512 --json | python docs/memory_length.py

The dashed line marks the length in training. The picture names the model's text and the number of targets.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

FILE = Path(__file__).parent / "figures" / "memory-length.svg"


def draw(scored: dict[str, Any], trained: int, file: Path) -> None:
    """Draw the results of `txl eval --json` into `file`; `trained` is the length of the memory in training."""
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    results = sorted(scored["results"], key=lambda result: result["mem_len"])
    name = "ppl" if results[0]["unit"] in ("word", "bpe") else "bpc"
    lengths, costs = [result["mem_len"] for result in results], [result[name] for result in results]
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "memory", "font.size": 11}
    figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
    if trained in lengths:
        axis.axvline(lengths.index(trained), color="0.6", linestyle="--", linewidth=1)
        axis.annotate("as in training ", (lengths.index(trained), costs[0]), ha="right", color="0.3")
    axis.plot(range(len(lengths)), costs, marker="o", color="#c2410c")
    beneath = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    for position, cost in enumerate(costs):
        axis.annotate(f"{cost:.3f}", (position, cost), (4, 10), textcoords="offset points", ha="center", bbox=beneath)
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axis.set_xlabel("tokens of memory at test time")
    axis.set_ylabel(f"{name} of {results[0]['targets']:,} targets")
    axis.locator_params(axis="y", nbins=5)
    axis.margins(y=0.18)
    axis.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(exist_ok=True)
    figure.savefig(file, metadata={"Date": None, "Title": f"{name} of {Path(scored['run']).name} by length of memory"})


if __name__ == "__main__":
    from transformer_xl.run.checkpoint import load_config
    from transformer_xl.run.folder import find_checkpoint

    given = json.load(sys.stdin)
    draw(given, load_config(find_checkpoint(given["run"])).train.mem_len, FILE)
    print(FILE)
