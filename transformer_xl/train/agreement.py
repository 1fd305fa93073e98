"""What ranks must have in common before they train. All of them call each check."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from ..config.settings import RunConfig, TrainConfig
from ..data.corpus import Corpus
from ..mistake import Mistake
from ..run.folder import Run
from ..runtime.files import SEAL, digest_of, digest_of_json
from ..runtime.ranks import Ranks

SHARED_SECONDS = 60
"""A disk that machines share may need this long to show a new file."""


def check_ranks(config: TrainConfig, ranks: Ranks) -> None:
    """Refuse a batch that the ranks cannot share, and a recording of a step of several ranks."""
    if config.cuda_graph and ranks.size > 1:
        raise Mistake("train.cuda_graph must be false with several ranks. Leave it out.")
    parts = config.batch_chunk * ranks.size
    if config.batch_size % parts:
        raise Mistake(
            f"train.batch_size must be a multiple of {parts}, train.batch_chunk times the ranks, got "
            f"{config.batch_size}. Change it, or start another number of ranks."
        )


def check_alike(config: RunConfig, corpus: Corpus, run: Run, ranks: Ranks) -> None:
    """Refuse ranks that have other settings, texts or checkpoints than the first. Another backend changes only the
    rounding of their rows."""
    corpus_alone = replace(config.corpus, name="", vocab="")  # paths may differ
    settings = replace(config, corpus=corpus_alone, train=replace(config.train, backend="auto", device="auto"))
    texts = {name: split.sha256 for name, split in corpus.header.splits.items()}
    sums = None if run.latest is None else _content(run.latest / SEAL)
    held = {
        "settings": asdict(settings),
        "texts": [texts, corpus.vocab.fingerprint],
        "checkpoints": [run.step, sums],
    }
    for what, content in held.items():
        first, *others = ranks.gather(_digest(content))
        if not all(torch.equal(first, other) for other in others):
            raise Mistake(
                f"All ranks must have the same {what}, and theirs differ. Start one command on all machines, let them "
                "see one run folder and one text, and name train.precision if their processors differ."
            )


def check_folder(run: Run, ranks: Ranks) -> None:
    """Refuse a rank that does not see what the first wrote into the run's folder, where it would find no checkpoint to
    score."""
    file, end = run.path / "environment.json", time.monotonic() + SHARED_SECONDS
    first = ranks.gather(_digest(_content(file)))[0]
    while not torch.equal(_digest(_content(file)), first):
        if time.monotonic() > end:
            raise Mistake(
                f"{run.path} must be one folder for all ranks, and rank {ranks.rank} has another. Put it on a disk "
                "that all machines share."
            )
        time.sleep(1)


def _content(file: Path) -> str | None:
    return digest_of(file) if file.exists() else None


def _digest(content: object) -> UInt8[Tensor, " N"]:
    return torch.frombuffer(bytearray.fromhex(digest_of_json(content)), dtype=torch.uint8)
