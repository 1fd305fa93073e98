"""Begin with n-gram embeddings that come from counts of the text that training will not read (negative: see LOG.md).

    python -m experiments.counted enwik8-small --steps 1100 --stop 500 --model.ngrams 1 2 3 4 5 6 8 [--counted]

For an n-gram g, its next tokens w have the log ratio log((c(g, w) + k p(w)) / ((c(g) + k) p(w))). An embedding is this
row of ratios in the directions of the largest singular values of the shortest n-grams' rows. Prints the mean bpc of
training in each 100 steps.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import numpy as np
import torch

from transformer_xl import load_recipe, open_corpus, settle
from transformer_xl.model.baselines import build_model
from transformer_xl.model.ngrams import NgramEmbedding
from transformer_xl.runtime.device import prepare_process
from transformer_xl.train import Trainer
from transformer_xl.train.loop import train_segments

PRIOR, SCALE, PIECE = 1.0, 0.05, 1 << 22
"""k; the root mean square of the embeddings; tokens whose rows are computed at a time."""


@torch.no_grad()
def fill(ngrams: NgramEmbedding, ids: np.ndarray, vocab: int, unread: list[tuple[int, int]]) -> None:
    """Set the table by the counts of the ranges `unread`."""
    share = np.bincount(ids, minlength=vocab) + 0.5
    share, directions = torch.from_numpy(share / share.sum()).float(), None
    for part, n in enumerate(ngrams.lengths):
        keys = []
        for low, high in ((a, min(a + PIECE, end - 1)) for start, end in unread for a in range(start, end - 1, PIECE)):
            begin = max(low - n + 1, 0)
            text = torch.from_numpy(ids[begin : high + 1].astype(np.int64))
            rows = ngrams.rows_of(text[None, :-1], high - low)[0, :, part] - part * ngrams.rows
            keys.append((rows * vocab + text[low - begin + 1 :]).numpy())
        pairs, counts = np.unique(np.concatenate(keys), return_counts=True)
        row, token = torch.from_numpy(pairs // vocab), torch.from_numpy(pairs % vocab)
        seen = torch.from_numpy(counts).float()
        total = torch.zeros(ngrams.rows).index_add_(0, row, seen)
        unseen = torch.log(PRIOR / (total + PRIOR))
        above = torch.log1p(seen / (PRIOR * share[token]))
        if directions is None:
            weighted = above * total[row].clamp(max=1e4).sqrt()
            matrix = torch.sparse_coo_tensor(torch.stack([row, token]), weighted, (ngrams.rows, vocab))
            directions = torch.svd_lowrank(matrix, q=ngrams.table.embedding_dim)[2]
        own = ngrams.table.weight[part * ngrams.rows : (part + 1) * ngrams.rows]
        own.copy_(unseen[:, None] * directions.sum(0))
        for piece in range(0, len(row), PIECE):
            chosen = slice(piece, piece + PIECE)
            own.index_add_(0, row[chosen], above[chosen, None] * directions[token[chosen]])
        often = total.sqrt()
        own.mul_(SCALE / ((own.square().mean(1) * often).sum() / often.sum()).sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, required=True, help="of the schedule")
    parser.add_argument("--stop", type=int, required=True, help="after this step")
    parser.add_argument("--counted", action="store_true")
    options, words = parser.parse_known_args()
    prepare_process()
    config: Any = load_recipe(options.recipe, [*words, "--train.max-steps", str(options.steps)])
    corpus = open_corpus(config.corpus)
    config = settle(config, corpus)
    torch.manual_seed(config.train.seed)
    model = build_model(config.model).train()
    start = time.perf_counter()
    if options.counted:
        ids = np.asarray(corpus.split("train").ids)
        stream = len(ids) // config.train.batch_size
        read = options.steps * config.train.tgt_len + 1
        unread = [(i * stream + read, (i + 1) * stream) for i in range(config.train.batch_size)]
        fill(model.ngrams, ids, config.model.vocab_size, unread)  # type: ignore[arg-type]
        print(f"counted in {time.perf_counter() - start:.0f} s", flush=True)
    trainer, nats, targets = Trainer(model, train_segments(corpus, config), config.train), 0.0, 0
    for step in range(1, options.stop + 1):
        result = trainer.advance()
        nats, targets = nats + result.nats, targets + result.targets
        if step % 100 == 0:
            print(f"step {step}  bpc {nats / targets / math.log(2):.4f}", flush=True)
            nats, targets = 0.0, 0


if __name__ == "__main__":
    main()
