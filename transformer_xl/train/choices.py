"""Choose the settings that are "auto", for this machine and a corpus."""

from __future__ import annotations

import sysconfig
from dataclasses import replace

from ..config.problems import WrongSettings
from ..config.settings import RunConfig, TrainConfig, TransformerXLConfig
from ..data.corpus import Corpus
from ..mistake import Mistake
from ..ops import native
from ..ops.choice import native_refusal, resolve_backend, triton_refusal
from ..runtime.device import PRECISIONS, resolve_device, resolve_precision


def resolve_settings(config: RunConfig, corpus: Corpus) -> RunConfig:
    """`config` with the vocabulary size of the corpus, and a device, precision and backend for this machine.

    Raises:
        Mistake: the recipe is for another vocabulary size, or this machine lacks something asked for by name.
    """
    size = len(corpus.vocab)
    if config.model.vocab_size not in (0, size):
        raise Mistake(
            f"model.vocab_size must be {size}, the vocabulary size of the corpus {config.corpus.name}, got "
            f"{config.model.vocab_size}. Set it to 0 to follow the corpus."
        )
    end = corpus.vocab.end_of_documents(config.corpus.document_end)
    if config.model.document_end not in (None, end) and end is not None:
        raise Mistake(
            f"model.document_end must be {end}, the id of corpus.document_end, got {config.model.document_end}. Leave "
            "it out."
        )
    end = config.model.document_end if end is None else end
    chosen = {name: choice["name"] for name, choice in choices(config.train, config.model).items()}
    train = replace(config.train, **chosen)
    folder = sysconfig.get_paths()["include"]
    if train.compile and train.device == "cpu" and not native.finds("Python.h", folder):
        raise Mistake(
            f"train.compile must be false on a CPU without a C++ compiler and {folder}/Python.h. Install g++ and "
            "python3-dev, or leave it out."
        )
    if train.cuda_graph and not can_record(train, config.model):
        raise Mistake(
            "train.cuda_graph needs a CUDA device, model.kind = transformer-xl and no model.cutoffs, whose softmax "
            "waits for the device. Leave it out."
        )
    try:
        model = replace(config.model, vocab_size=size, document_end=end)
    except WrongSettings as error:
        name = f"model.vocab_size is the size of the vocabulary of {config.corpus.name}"
        raise Mistake("\n".join(f"{each.named('model.{}')} {name}." for each in error.problems)) from error
    return replace(config, model=model, train=train)


def choices(config: TrainConfig, model: TransformerXLConfig) -> dict[str, dict[str, str]]:
    """The device, precision and attention backend for training with these settings, each with the reason.

    Raises:
        Mistake: this machine lacks something that is asked for by name.
    """
    device = resolve_device(config.device)
    precision, why_precision = resolve_precision(config.precision, device)
    dtype = PRECISIONS[precision]
    rows = config.batch_size // config.batch_chunk  # of all ranks, so their number does not change the backend
    scores = rows * model.n_head * config.tgt_len * (config.mem_len + config.tgt_len)
    asked, why_not = config.backend, None
    if asked == "native":  # a run may go on where the kernels are not built
        why_not = native_refusal(device, dtype)
    reason = triton_refusal(device, dtype, model.d_head) if asked == "triton" else None
    if asked == "chunked" and device.type == "cuda":
        reason = "it is for the CPU"
    if reason:
        raise Mistake(f"train.backend must be one that can serve here, got {asked}: {reason}. Use auto.")
    backend, why_backend = resolve_backend(
        "auto" if why_not else asked,
        device,
        dtype,
        model.d_head,
        training=True,
        scores=scores,
        queries=config.tgt_len,
    )
    if model.base_kind not in ("transformer-xl", "shaw"):
        backend, why_backend = "auto", f"kind = {model.kind} has no relative attention"
    elif why_not:
        why_backend = f"native cannot serve: {why_not}; {why_backend}"
    reasons = {"cuda": "the first CUDA device", "mps": "Apple's GPU"}
    found = reasons.get(device.type, "no CUDA device was found")
    return {
        "device": {"name": str(device), "why": found if config.device == "auto" else "as the settings say"},
        "precision": {"name": precision, "why": why_precision},
        "backend": {"name": backend, "why": why_backend, "asked": asked},
    }


def can_record(config: TrainConfig, model: TransformerXLConfig) -> bool:
    """Whether a step of this training can be recorded as a CUDA graph."""
    return config.device.startswith("cuda") and model.kind == "transformer-xl" and not model.cutoffs
