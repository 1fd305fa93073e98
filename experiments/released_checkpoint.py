"""Write a full-size random checkpoint in the layout of the released WikiText-103 model, to test its conversion.

    python -m venv tf && tf/bin/pip install tensorflow-cpu numpy
    tf/bin/python -m experiments.released_checkpoint vocab.counts.txt.xz tf_wt103
    txl data wikitext-103
    txl convert tf_wt103 --from tensorflow --to wt103 && txl eval wt103 --max-tokens 10000

The first argument lists all words except `<eos>` and `<unk>`, one per line, each followed by its count. Equally
frequent words are put in another order, as in another version of Python, and the pickled corpus has as many ids as the
real one (103 million).
"""

from __future__ import annotations

import json
import lzma
import os
import pickle
import random
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import numpy as np
import tensorflow as tf

LAYERS, HEADS, WIDTH, HEAD, INNER, DIV = 18, 16, 1024, 64, 4096, 4
CUTOFFS = (20_000, 40_000, 200_000)
TRAIN_TOKENS = 103_227_021


def shapes(vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The variables of that model, below `transformer/`; projections of all bands but the first are shared."""
    edges = (0, *CUTOFFS, vocab_size)
    for i, (low, high) in enumerate(pairwise(edges)):
        width = WIDTH // DIV**i
        yield f"adaptive_embed/cutoff_{i}/lookup_table", (high - low, width)
        yield f"adaptive_embed/cutoff_{i}/proj_W", (width, WIDTH)
        yield f"adaptive_softmax/cutoff_{i}/b", (high - low,)
    yield "adaptive_softmax/cutoff_0/proj", (WIDTH, WIDTH)
    yield "adaptive_softmax/cutoff_0/cluster_W", (len(CUTOFFS), WIDTH)
    yield "adaptive_softmax/cutoff_0/cluster_b", (len(CUTOFFS),)
    for layer in range(LAYERS):
        name = f"layer_{layer}"
        yield f"{name}/rel_attn/qkv/kernel", (WIDTH, 3 * HEADS * HEAD)
        yield f"{name}/rel_attn/r/kernel", (WIDTH, HEADS * HEAD)
        yield f"{name}/rel_attn/o/kernel", (HEADS * HEAD, WIDTH)
        yield f"{name}/ff/layer_1/kernel", (WIDTH, INNER)
        yield f"{name}/ff/layer_1/bias", (INNER,)
        yield f"{name}/ff/layer_2/kernel", (INNER, WIDTH)
        yield f"{name}/ff/layer_2/bias", (WIDTH,)
        for norm in ("rel_attn", "ff"):
            yield from ((f"{name}/{norm}/LayerNorm/{part}", (WIDTH,)) for part in ("beta", "gamma"))
    yield from ((f"r_{kind}_bias", (LAYERS, HEADS, HEAD)) for kind in "wr")


def write_weights(folder: Path, vocab_size: int) -> None:
    """Write `model.ckpt-0` and the file that names it."""
    generator = np.random.default_rng(0)
    names, values = ["global_step"], [tf.constant(0, tf.int64)]
    for name, shape in shapes(vocab_size):
        names.append(f"transformer/{name}")
        values.append(tf.constant(generator.normal(float(name.endswith("gamma")), 0.02, shape), tf.float32))
    folder.mkdir(parents=True)
    part, whole = str(folder / "part"), str(folder / "model.ckpt-0")
    tf.raw_ops.SaveV2(prefix=part, tensor_names=names, shape_and_slices=[""] * len(names), tensors=values)
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=[part], destination_prefix=whole)
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-0"\n')


def write_corpus(folder: Path, words: list[str]) -> None:
    """Write `cache.pkl`, whose classes do not exist when it is read, and `corpus-info.json`."""
    folder.mkdir(parents=True)
    vocab, corpus = instance("vocabulary", "Vocab"), instance("data_utils", "Corpus")
    vars(vocab).update(special=["<eos>"], min_freq=0, max_size=None, lower_case=False, delimiter=None, vocab_file=None)
    vars(vocab).update(
        counter=Counter(words), idx2sym=words, sym2idx=OrderedDict(zip(words, range(len(words)), strict=True))
    )
    cutoffs = [0, *CUTOFFS, len(words)]
    ids = np.random.default_rng(1).integers(0, len(words), TRAIN_TOKENS)
    vars(corpus).update(dataset="wt103", vocab=vocab, cutoffs=cutoffs, train=ids, valid=ids[:9], test=ids[:9])
    with (folder / "cache.pkl").open("wb") as file:
        pickle.dump(corpus, file, protocol=2)
    (folder / "corpus-info.json").write_text(
        json.dumps({"vocab_size": len(words), "cutoffs": cutoffs, "dataset": "wt103"})
    )


def instance(module: str, name: str) -> object:
    """An empty object of a class with this name."""
    home = sys.modules.setdefault(module, ModuleType(module))
    setattr(home, name, type(name, (), {"__module__": module}))
    return getattr(home, name)()


def main() -> None:
    counts, folder = Path(sys.argv[1]), Path(sys.argv[2])
    text = lzma.decompress(counts.read_bytes()).decode()
    lines = [line.split(" ") for line in text.split("\n") if line]
    order = random.Random(0)
    lines.sort(key=lambda line: (-int(line[1]), order.random()))
    words = ["<eos>", *(word for word, _ in lines)]
    words.insert(24, "<unk>")
    write_corpus(folder / "data", words)
    write_weights(folder / "model", len(words))


if __name__ == "__main__":
    main()
