"""From a folder of text to a trained model, its score with and without memory, and text that it writes.

$ python examples/own_text.py
Bytes of asyncio: train 440,861, valid 24,492, test 24,493
...
1.401 bits per byte with a memory of 128 bytes, over 24,492 bytes of test
1.400 bits per byte with a memory of 64 bytes, over 24,492 bytes of test
1.934 bits per byte with a memory of 0 bytes, over 24,492 bytes of test
|     def close(self):
|         if self._closrror = self._tasks:
|            if self._waiter = None
|             self._tasks:
|             self._protocol = protocol()
|
|         self._protocol = protocol()
|
|         self._protocol_connection_lost(self, self._format_sig)
|         self._parent_tasks = 0
|         if self._protocol_co
More text: txl generate runs/own-text
"""

import asyncio
from pathlib import Path
from textwrap import indent

import torch
import tyro

from transformer_xl import (
    StreamLoader,
    TransformerXL,
    evaluate,
    fit,
    load_model,
    load_recipe,
    open_corpus,
    resolve_settings,
)

SMALL = ["--model.n-layer=3", "--model.n-head=2", "--model.d-model=128", "--model.d-inner=512"]
SMALL += ["--train.tgt-len=64", "--train.mem-len=64"]


def main(
    folder: tyro.conf.Positional[Path] = Path(asyncio.__file__).parent,
    steps: int = 300,
    out: Path = Path("runs/own-text"),
) -> None:
    """Train a small model on the text files in FOLDER (default: the source of asyncio), and leave the run in OUT."""
    if steps < 1:
        raise SystemExit(f"--steps must be at least 1, got {steps}.")
    if out.exists():
        raise SystemExit(f"--out must be a new folder, and {out} exists. Remove it, or name another.")
    config = load_recipe("text-fast", [*SMALL, f"--train.max-steps={steps}"], data=folder)
    corpus = open_corpus(config.corpus)
    sizes = (f"{split} {len(corpus.split(split).ids):,}" for split in ("train", "valid", "test"))
    print(f"Bytes of {folder.name}: {', '.join(sizes)}")
    config = resolve_settings(config, corpus)  # the size of the vocabulary, and what this machine has
    torch.manual_seed(config.train.seed)
    fit(TransformerXL(config.model, backend=config.train.backend), corpus, config, out)

    model = load_model(out)
    for mem_len in (128, 64, 0):
        lengths = model.with_lengths(mem_len=mem_len).config.eval_lengths
        test = StreamLoader(corpus.split("test"), batch_size=8, tgt_len=lengths.tgt_len)
        result = evaluate(model.model, test, lengths)
        print(f"{result.bpc:.3f} bits per byte with a memory of {mem_len} bytes, over {result.targets:,} bytes of test")
    start = "    def close(self):\n"
    print(indent(start + model.generate(start, max_tokens=300, temperature=0.7, seed=1), "| ", lambda line: True))
    print(f"More text: txl generate {out}")


if __name__ == "__main__":
    tyro.cli(main)
