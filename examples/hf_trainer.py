"""Hugging Face's Trainer on the classes of `transformer_xl.hf`, with the memory carried from step to step.

$ pip install "transformers>=5" accelerate
$ python examples/hf_trainer.py
...
2.921 bits per byte of test with a memory of 64
2.973 bits per byte of test with a memory of 0

Each batch is the next segment of 16 streams, in order, so the Trainer must not shuffle. A model of transformers shifts
its labels: the first byte of each segment is context only, so 63 of 64 bytes are targets. The Trainer's checkpoints do
not hold the memory: a run that resumes starts with an empty one.
"""

import asyncio
from pathlib import Path

import tyro
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

from transformer_xl import Lengths, StreamLoader, evaluate, open_corpus
from transformer_xl.hf import TransformerXLForCausalLM, TransformerXLHFConfig, fast_tokenizer


class StreamTrainer(Trainer):
    """A Trainer whose batches are consecutive segments; the memory after one is the memory before the next."""

    memory = None

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=None)  # a batch is a segment

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if inputs.pop("begins"):  # a new epoch
            self.memory = None
        output = model(**inputs, past_key_values=self.memory)
        self.memory = output.past_key_values
        return (output.loss, output) if return_outputs else output.loss


def main(steps: int = 150, out: Path = Path("runs/hf-trainer")) -> None:
    """Train a small model on the source of asyncio, and save it in OUT for transformers."""
    if steps < 1:
        raise SystemExit(f"--steps must be at least 1, got {steps}.")
    set_seed(1)
    corpus = open_corpus(Path(asyncio.__file__).parent)
    sizes = {"n_layer": 3, "n_head": 2, "d_head": 64, "d_model": 128, "d_inner": 512, "tgt_len": 64, "mem_len": 64}
    config = TransformerXLHFConfig(vocab_size=len(corpus.vocab), **sizes, pre_lnorm=True, final_norm=True)
    segments = [
        {"input_ids": ids, "labels": ids, "begins": reset is not None}
        for ids, _, reset in StreamLoader(corpus.split("train"), batch_size=16, tgt_len=64)
    ]
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        learning_rate=4e-3,
        warmup_steps=steps // 10,
        lr_scheduler_type="cosine",
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    trainer = StreamTrainer(TransformerXLForCausalLM(config), arguments, train_dataset=segments)
    trainer.train()
    trainer.save_model()
    fast_tokenizer(corpus.vocab).save_pretrained(out)

    model = AutoModelForCausalLM.from_pretrained(out).eval()
    test = StreamLoader(corpus.split("test"), batch_size=8, tgt_len=64)
    for mem_len in (64, 0):
        result = evaluate(model.model, test, Lengths(tgt_len=64, mem_len=mem_len))
        print(f"{result.bpc:.3f} bits per byte of test with a memory of {mem_len}")


if __name__ == "__main__":
    tyro.cli(main)
