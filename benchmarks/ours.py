"""This package's model and attention op as contenders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from transformer_xl.config.settings import Lengths, TrainConfig, TransformerXLConfig
from transformer_xl.data.loader import Segment
from transformer_xl.interop.reading import read_model
from transformer_xl.model.memory import Memory
from transformer_xl.model.step import Step, step_state
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.ops import relative_attention
from transformer_xl.ops.testing import Case, make_inputs
from transformer_xl.runtime.device import PRECISIONS, prepare_process
from transformer_xl.train.optim import build_optimizers
from transformer_xl.train.step import train_step


def read_weights(job: dict[str, Any]) -> dict[str, Tensor]:
    """The state of `TransformerXL` that `write_weights` or transformers wrote."""
    folder = Path(job["weights"])
    if (folder / "config.json").exists():
        return dict(read_model(folder, "huggingface").model.state_dict())
    return load_file(folder / "ours.safetensors")


def model_config(job: dict[str, Any]) -> TransformerXLConfig:
    lists = {name: tuple(value) for name, value in job["model"].items() if isinstance(value, list)}
    return TransformerXLConfig(**job["model"] | lists)


def write_weights(job: dict[str, Any]) -> None:
    """Draw the weights of all contenders into the folder of the job, if Hugging Face's model does not."""
    torch.manual_seed(0)
    state, folder = TransformerXL(model_config(job)).state_dict(), Path(job["weights"])
    folder.mkdir()
    save_file({name: x.clone() for name, x in state.items()}, folder / "ours.safetensors")


class Ours:
    """`TransformerXL` as `txl train`, `txl eval` and `txl generate` use it."""

    def __init__(self, job: dict[str, Any]) -> None:
        prepare_process()
        recompute = job.get("train", {}).get("recompute", False)
        self.module = TransformerXL(model_config(job), backend=job["backend"], recompute=recompute)
        self.module.load_state_dict(read_weights(job))
        self.module.to(job["device"])
        self.caching = job["part"] != "train"
        self.lengths = Lengths(tgt_len=job["tgt_len"], mem_len=job["mem_len"])
        if self.caching:
            self.module = self.module.for_inference(job["precision"])
        else:
            settings = job["train"] | {"betas": tuple(job["train"]["betas"]), "trackers": ()}
            self.config = TrainConfig(**settings)
            self.optimizers = build_optimizers(self.module, self.config)

    def state(self, batch: int, length: int) -> Any:
        sizes = self.module.config
        like = self.module.softmax.bias
        memory = Memory(tuple(like.new_zeros(batch, length, sizes.d_model) for _ in range(sizes.n_layer)))
        if self.module.ngrams is not None:
            memory = memory.with_tokens(self.module.ngrams.no_tokens(batch, length))
        return self.module.cached(memory, self.lengths) if self.caching else memory

    def score(self, ids: Tensor, targets: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.module(ids, targets, state, self.lengths)

    def following(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        state = step_state(self.module, state, self.lengths)
        if isinstance(state, Step):
            return state(ids), state
        log_probs, state = self.module.log_probs(ids, state, self.lengths, last=1)
        return log_probs[:, -1], state

    def learn(self, ids: Tensor, targets: Tensor, state: Any) -> Any:
        segment = Segment(ids, targets, None)
        _, state = train_step(self.module, self.optimizers, segment, state, self.config, step=0)
        return state


class Op:
    """`relative_attention` with one backend: forward, or forward and backward."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.inputs, self.backward = op_inputs(job), job["backward"]
        self.kept_bytes = sum(x.numel() * x.element_size() for x in self.inputs.values())
        self.cotangent = torch.randn_like(self.inputs["q"])
        self.attend = self.attention(job)
        try:
            self.run()
        except ValueError as error:
            raise NotImplementedError(str(error)) from error

    def attention(self, job: dict[str, Any]) -> Callable[..., Tensor]:
        return partial(relative_attention, backend=job["backend"])

    def run(self) -> None:
        with torch.set_grad_enabled(self.backward):
            out = self.attend(**self.inputs)
            if self.backward:
                torch.autograd.grad(out, list(self.inputs.values()), self.cotangent)


def op_inputs(job: dict[str, Any]) -> dict[str, Any]:
    """Unit normal arguments of the op; they require gradients if the job has a backward pass."""
    batch, heads, head_size = job["batch"], job["heads"], job["head_size"]
    case = Case(job["tgt_len"], job["mem_len"], batch=batch, heads=heads, head_size=head_size)
    drawn = make_inputs(case, PRECISIONS[job["precision"]], job["device"])
    return {name: x.detach().contiguous().requires_grad_(job["backward"]) for name, x in drawn.items()}
