"""What each rank does for tests/train/test_distributed.py.

`torchrun tests/ranks.py FOLDER` leaves the findings of rank 0.

One start serves all cases, for starting is what takes time.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from small_models import VOCAB, small_model
from torch import Tensor

from transformer_xl.config.settings import TrainConfig
from transformer_xl.data.loader import StreamLoader
from transformer_xl.evaluation.score import evaluate
from transformer_xl.run.parts import set_weights, weights
from transformer_xl.runtime.ranks import Ranks, join_ranks
from transformer_xl.train.objective import Objective
from transformer_xl.train.parallel import whole
from transformer_xl.train.step import MOST_SKIPPED, Trainer

TRAIN = TrainConfig(
    tgt_len=5, mem_len=7, batch_size=8, max_steps=6, lr=0.01, device="cpu", precision="fp32", backend="strided"
)  # fmt: skip
BANDS = {"cutoffs": (5, 19), "div_val": 2, "tie_projs": (False, True, True)}
"""The last words are so rare in `tokens` that most ranks have none of them in a segment."""
AWD: dict[str, Any] = {"mem_len": 0, "context_len": 4, "random_tgt_len": True, "ar_alpha": 0.2, "tar_beta": 0.1}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "bands": (BANDS, {}),
    "chunks": (BANDS, {"batch_chunk": 2}),
    "half loss": ({}, {"loss": "half"}),
    "muon": ({"untie_r": True}, {"optimizer": "muon", "momentum": 0.9}),
    "sgd, recomputed": ({"pre_lnorm": True, "final_norm": True}, {"optimizer": "sgd", "recompute": True}),
    "gated": ({"pre_lnorm": True, "gate": "gru"}, {}),
    "Penn Treebank's": ({"share_position_projection": True}, AWD),
    "shaw": ({"kind": "shaw", "positions": 9}, {}),
    "vaswani": ({"kind": "vaswani"}, {"mem_len": 0}),
    "al-rfou": ({"kind": "al-rfou", "positions": 5}, {"mem_len": 0}),
    "lstm": ({"kind": "lstm"}, {}),
    "qrnn": ({"kind": "qrnn", "cutoffs": (5, 19)}, {}),
    "documents in a stream": ({"document_end": 1, "ngrams": (2,), "ngram_rows": 37, "ngram_width": 6}, {}),
    "averaged": ({}, {"average_from": 2, "schedule": "constant"}),
    "short at first": ({}, {"tgt_len": 6, "mem_len": 8, "short_share": 0.5}),
    "n-grams and matches": (
        {"ngrams": (1, 3), "ngram_rows": 37, "ngram_width": 6, "matches": (2,), "match_window": 7},
        {"batch_chunk": 2},
    ),
}
"""Settings of model and training."""
LAYERS = {"n_layer": 2}
"""FSDP plans each operation on all tensors of a model, which takes most of the time."""
ALONE = Ranks()
NOT_SHARDED = {"averaged", "documents in a stream", "n-grams and matches"}
DOCUMENTS = (0, 50, 51, 120, 133, 220, 390)


def tokens() -> np.ndarray:
    drawn = np.random.default_rng(3).geometric(0.25, size=500)
    return np.minimum(drawn - 1, VOCAB - 1).astype(np.int64)


def trainer_of(
    case: str,
    ranks: Ranks,
    *,
    documents: bool = False,
    dropout: float = 0.0,
    stored: dict[str, Tensor] | None = None,
    **changes: Any,
) -> Trainer:
    """The same trainer on every rank, with the weights of one seed or those given; rows are dealt out."""
    shape, settings = CASES[case]
    config = replace(TRAIN, **(settings | changes))
    dtype = torch.float64 if config.precision == "fp32" else torch.float32  # autocast leaves float64 as it is
    model = small_model(train=True, dtype=dtype, dropout=dropout, dropatt=dropout, **LAYERS | shape)
    model.backbone.recompute = config.recompute
    if stored is not None:
        set_weights(model, stored, "what was saved")
    loader = StreamLoader(
        tokens(),
        batch_size=config.batch_size,
        tgt_len=config.tgt_len,
        context_len=config.context_len,
        documents=DOCUMENTS if documents else None,
        random_seed=config.seed if config.random_tgt_len else None,
    )
    return Trainer(model, loader, config, ranks=ranks)


def half_precision(precision: str, ranks: Ranks, **changes: Any) -> Trainer:
    """A trainer whose first step in fp16 overflowed."""
    trainer = trainer_of("bands", ranks, precision=precision, **changes)
    if precision == "fp16":
        trainer.scale.value = 2.0**40
        assert trainer.advance().overflowed
        trainer.scale.value = 2.0**10
    return trainer


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: whole(value.detach()).clone() for name, value in weights(trainer.model).items()}


def findings(trainer: Trainer, steps: int = 4) -> dict[str, Tensor]:
    """What there is to compare after so many steps, whole."""
    results = torch.tensor([trainer.advance() for _ in range(steps)], dtype=torch.float64)
    found = {"nats, targets, norm": results} | {f"weight.{k}": value for k, value in weights_of(trainer).items()}
    if trainer.average is not None:
        found |= {f"average.{name}": value.detach() for name, value in weights(trainer.average.module).items()}
    return found | {name: value for name, value in trainer.state().tensors.items() if name.startswith("memory.")}


def calls(trainer: Trainer) -> dict[str, Tensor]:
    """The model's own calls, which all ranks make with the same rows."""
    ids = torch.from_numpy(tokens()[:20]).view(4, 5)
    model, lengths = trainer.model.eval(), trainer.config.lengths
    nll, memory = model(ids, ids, None, lengths)
    hidden, _ = model.hidden(ids, memory, lengths)
    log_probs, _ = model.log_probs(ids, memory, lengths, last=2)
    loss, _, _ = Objective(model)(ids, ids, memory, lengths)
    found = {"nll": nll, "hidden": hidden, "log_probs": log_probs, "loss": loss}
    return {name: value.detach() for name, value in found.items()}


def scored(trainer: Trainer, batch_size: int) -> Tensor:
    """Nats and number of the targets of a text whose streams are dealt out."""
    rows = trainer.ranks.rows(batch_size)
    loader = StreamLoader(tokens()[:101], batch_size=batch_size, tgt_len=5, rows=rows)
    result = evaluate(trainer.whole_model(), loader, trainer.config.lengths, total=trainer.ranks.total)
    return torch.tensor([result.nats, result.targets], dtype=torch.float64)


def all_findings(ranks: Ranks, parallel: str) -> dict[str, dict[str, Tensor]]:
    cases = CASES if ranks.size == 2 else ("bands", "chunks")
    found = {}
    for case in cases:
        if parallel == "ddp" or case not in NOT_SHARDED:
            found[case] = findings(trainer_of(case, ranks, parallel=parallel))
    trainer = trainer_of("bands", ranks, parallel=parallel)
    found["scored"] = {str(rows): scored(trainer, rows) for rows in (1, 3, 8)}
    trainer = trainer_of("bands", ranks, parallel=parallel, documents=True)
    found["documents"] = findings(trainer, 3)
    half_way = trainer.state()
    found["state"] = half_way.tensors
    found["resumed elsewhere"] = findings(trainer, 3)
    if ranks.size == 4:
        return found

    found["calls"] = calls(trainer_of("bands", ranks, parallel=parallel))
    for precision in ("bf16", "fp16"):
        found[precision] = findings(half_precision(precision, ranks, parallel=parallel))

    trainer = trainer_of("chunks", ranks, parallel=parallel)
    trainer.advance()
    if not ranks.first:
        trainer.memory.layers[1][0, 0, 0] = float("inf")
    told = ""
    try:
        for _ in range(MOST_SKIPPED):
            trainer.advance()
    except FloatingPointError as error:
        told = str(error)
    expected = "the loss" if ranks.first else "the memory of layer 1"
    found["diagnosis"] = {"told": torch.tensor(ranks.total([f"infinity is in {expected}." in told]))}

    trainer = trainer_of("bands", ranks, parallel=parallel, documents=True, dropout=0.2)
    torch.manual_seed(ranks.rank)
    findings(trainer, 3)
    stored, half_way = weights_of(trainer), trainer.state()
    found["undisturbed"] = findings(trainer, 3)
    trainer = trainer_of("bands", ranks, parallel=parallel, documents=True, dropout=0.2, stored=stored)
    trainer.restore(half_way)
    found["resumed"] = findings(trainer, 3)
    return found


def main(folder: Path) -> None:
    with join_ranks(torch.device("cpu")) as ranks:
        for parallel in ("ddp", "fsdp"):
            found = all_findings(ranks, parallel)
            if ranks.first:
                flat = {f"{case}|{name}": value for case, part in found.items() for name, value in part.items()}
                save_file(
                    {name: value.contiguous().clone() for name, value in flat.items()},
                    folder / f"{parallel}-{ranks.size}",
                )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
