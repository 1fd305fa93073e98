"""Fine-tune a trained model on documents that have nothing to do with each other, so each starts with an empty memory.

$ python examples/fine_tune.py
...
before, memory reset between documents: 2.844 bits per byte
before, memory kept between documents: 2.821 bits per byte
...
after, memory reset between documents: 2.282 bits per byte
after, memory kept between documents: 2.298 bits per byte

Each document is a docstring of the standard library. The model was trained on source code.
"""

import ast
import asyncio
import sysconfig
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import tyro

from transformer_xl import (
    LanguageModel,
    StreamLoader,
    TransformerXL,
    evaluate,
    fit,
    load_model,
    load_recipe,
    open_corpus,
    resolve_settings,
)
from transformer_xl.data.corpus import Corpus

SMALL = ["--model.n-layer=3", "--model.n-head=2", "--model.d-model=128", "--model.d-inner=512"]
SMALL += ["--train.tgt-len=64", "--train.mem-len=64"]


def write_documents(folder: Path) -> None:
    """Write each long docstring of the standard library into a file of its own."""
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for number, node in enumerate(ast.walk(ast.parse(source.read_bytes()))):
            owner = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            text = ast.get_docstring(node) if owner else None
            if text and len(text) > 200:
                (folder / f"{source.stem}-{number:05}.txt").write_text(text, encoding="utf-8")


def train_base(run: Path, steps: int) -> None:
    """Train a small model on the source of asyncio."""
    config = load_recipe("text-fast", [*SMALL, f"--train.max-steps={steps}"], data=Path(asyncio.__file__).parent)
    corpus = open_corpus(config.corpus)
    config = resolve_settings(config, corpus)
    torch.manual_seed(config.train.seed)
    fit(TransformerXL(config.model, backend=config.train.backend), corpus, config, run)


def print_scores(loaded: LanguageModel, corpus: Corpus, when: str) -> None:
    """Score the held-out documents. With and without resets the targets are the same."""
    lengths = loaded.config.eval_lengths
    documents = list(StreamLoader(corpus.split("test"), batch_size=8, tgt_len=lengths.tgt_len))
    for reset in (True, False):
        segments = documents if reset else [segment._replace(reset=None) for segment in documents]
        result = evaluate(loaded.model, segments, lengths)
        print(f"{when}, memory {'reset' if reset else 'kept'} between documents: {result.bpc:.3f} bits per byte")


def main(run: Path | None = None, steps: int = 150) -> None:
    """Fine-tune RUN for STEPS steps. Without RUN, a small model is trained first, for as many steps."""
    if steps < 1:
        raise SystemExit(f"--steps must be at least 1, got {steps}.")
    with TemporaryDirectory() as folder:
        documents = Path(folder, "documents")
        documents.mkdir()
        write_documents(documents)
        if run is None:
            run = Path(folder, "base")
            train_base(run, steps)
        trained = load_model(run)
        lengths = trained.config.train.lengths
        settings = ["--corpus.reset-documents", "--train.lr=3e-3", f"--train.max-steps={steps}"]
        settings += [f"--train.tgt-len={lengths.tgt_len}", f"--train.mem-len={lengths.mem_len}"]
        config = load_recipe("text-fast", settings, data=documents)
        corpus = open_corpus(config.corpus, trained.vocab)
        config = resolve_settings(replace(config, model=trained.config.model), corpus)
        print_scores(trained, corpus, "before")
        fit(trained.model, corpus, config, Path(folder, "tuned"))
        print_scores(load_model(Path(folder, "tuned")), corpus, "after")


if __name__ == "__main__":
    tyro.cli(main)
