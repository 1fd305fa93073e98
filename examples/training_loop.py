"""Your own training loop in plain PyTorch: the memory goes in and out of each step, as a value.

$ python examples/training_loop.py
step 100: 2.076 nats per byte
step 200: 1.494 nats per byte
step 300: 1.542 nats per byte
2.582 bits per byte of test with a memory of 64
2.667 bits per byte of test with a memory of 0
"""

import asyncio
from pathlib import Path

import torch
import tyro

from transformer_xl import (
    Lengths,
    RunConfig,
    StreamLoader,
    TrainConfig,
    TransformerXL,
    TransformerXLConfig,
    evaluate,
    load_model,
    open_corpus,
    save_checkpoint,
)


def main(steps: int = 300, out: Path = Path("runs/own-loop/checkpoint")) -> None:
    """Train on the source of asyncio, and leave a checkpoint in OUT."""
    if steps < 1:
        raise SystemExit(f"--steps must be at least 1, got {steps}.")
    if out.exists():
        raise SystemExit(f"--out must be a new folder, and {out} exists. Remove it, or choose another.")
    corpus = open_corpus(Path(asyncio.__file__).parent)
    lengths = Lengths(tgt_len=64, mem_len=64)
    torch.manual_seed(1)
    sizes = {"n_layer": 3, "n_head": 2, "d_head": 64, "d_model": 128, "d_inner": 512}
    shape = TransformerXLConfig(vocab_size=len(corpus.vocab), **sizes, pre_lnorm=True, final_norm=True)
    model = TransformerXL(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)
    # 0.1 of 10 steps would divide by zero
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps, pct_start=0.1001)

    train = StreamLoader(corpus.split("train"), batch_size=16, tgt_len=lengths.tgt_len)
    memory = None  # an empty one
    for step in range(steps):
        segment = train.segment(step)  # 16 streams; each goes on where its last segment ended
        if segment.reset is not None and memory is not None:  # a new epoch or document
            memory = memory.reset(segment.reset)
        nll, memory = model(segment.ids, segment.targets, memory, lengths)  # the memory carries no gradient
        loss = nll.sum() / (segment.targets >= 0).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            print(f"step {step + 1}: {loss.item():.3f} nats per byte")

    config = RunConfig(model=shape, train=TrainConfig(tgt_len=64, mem_len=64))  # the lengths at which it is used later
    save_checkpoint(out, model=model, vocab=corpus.vocab, config=config, step=steps)
    loaded = load_model(out)
    test = StreamLoader(corpus.split("test"), batch_size=8, tgt_len=lengths.tgt_len)
    for mem_len in (64, 0):
        result = evaluate(loaded.model, test, Lengths(tgt_len=64, mem_len=mem_len))
        print(f"{result.bpc:.3f} bits per byte of test with a memory of {mem_len}")


if __name__ == "__main__":
    tyro.cli(main)
