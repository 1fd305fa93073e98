"""Export a model, or a backbone, with its memory: as a graph of PyTorch or of ONNX.

    stream = Stream(model, lengths)
    stream.program                   # torch.export's
    stream.write_onnx("model.onnx")
    log_probs, *state = session.run(None, {"ids": ids, "memory": memory})  # by onnxruntime

The memory is the keys and values of each layer, [n_layer, B, 2, H, M, K], as in a `KVCache`: the weights do not change,
so nothing is projected twice. The first memory has M = 0. Each call reads a segment of any length T up to `tgt_len` for
any number of rows B, attends to the memory, and returns it with the segment, cut to `mem_len`. More state follows where
a model has it: `valid` with `model.document_end`, and the last `tokens` with n-grams and matches.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from ..config.settings import Lengths
from ..mistake import Mistake
from ..model.inference import KVCache
from ..model.modules import Keys, Queries, Vectors
from ..model.sublayer import Sublayer
from ..model.transformer_xl import TransformerXL, TransformerXLBackbone
from ..run.checkpoint import LoadedModel
from ..run.parts import write_json
from ..runtime.files import whole_folder

_ROWS, _QUERIES, _PAST = 3, 5, 7
"""The sizes of the call that a graph is made of: any but 0 and 1, which would be taken for constants."""


class _Joined:
    """A layer's keys and values, and those of the segment once it is read."""

    def __init__(self, kv: Float[Tensor, "B 2 H M K"]):
        self.kv: Tensor = kv

    def __call__(self, k: Queries, v: Queries) -> tuple[Keys, Keys]:
        self.kv = torch.cat([self.kv, torch.stack([k, v], 1)], 3)
        keys, values = self.kv.unbind(1)
        return keys, values


@dataclass(eq=False)
class _ValueCache(KVCache):
    """A `KVCache` whose calls write into no buffer, so that `torch.export` can follow them. It has all positions."""

    joined: Sequence[_Joined] = ()

    @property
    def pasts(self) -> Any:
        self.joined = [_Joined(kv) for kv in self.buffers]
        return self.joined

    def begin(self, tokens: int, lengths: Lengths) -> int:
        return 0

    def extend(self, inputs: Sequence[Vectors], *, mem_len: int) -> KVCache:
        kept = torch.sym_min(self.length + inputs[0].shape[1], mem_len)
        kv = self.joined[0].kv
        newest = torch.arange(kept, device=kv.device) + (kv.shape[3] - kept)
        buffers = [each.kv.index_select(3, newest) for each in self.joined]
        valid = None if self.valid is None else (self.valid + inputs[0].shape[1]).clamp(max=kept)
        return replace(self, buffers=buffers, length=kept, valid=valid)


class Stream(nn.Module):
    """A call of a model or a backbone for inference, whose state is a list of tensors; see the head of this file.

    Raises:
        Mistake: the model's memory has another form.
    """

    def __init__(self, model: TransformerXL | TransformerXLBackbone, lengths: Lengths):
        super().__init__()
        self.model: Any = model.for_inference() if isinstance(model, TransformerXL) else deepcopy(model).eval()
        self.backbone: Any = getattr(self.model, "backbone", self.model)
        self.lengths: Lengths = lengths
        config, empty = model.config, model.empty_memory(1, lengths)
        if config.zero_memory or not isinstance(model.cached(empty, lengths), KVCache):
            raise Mistake(
                "Only models whose memory is empty at the start can be exported to ONNX: without zero_memory, not of "
                "kind lstm or qrnn, nor of a kind with another forward or remember; got zero_memory = "
                f"{config.zero_memory}, kind = {config.kind}."
            )
        for module in self.modules():
            if isinstance(module, Sublayer):
                module.backend = "strided"
        reads_ids = isinstance(model, TransformerXL)
        more = {"valid": reads_ids and config.document_end is not None, "tokens": empty.tokens is not None}
        self.names: list[str] = ["ids" if reads_ids else "vectors", "memory"]
        """The names of the inputs; a state that is returned is called `next_...`."""
        self.names += [name for name, has in more.items() if has]
        # More than any call needs, also that of `program`: a graph has no case for exactly them.
        reach = max(lengths.mem_len + lengths.tgt_len, _QUERIES + _PAST) + 2
        with torch.no_grad():
            found = list(self.backbone.positions(reach, lengths.clamp_len, self.backbone.like))
        self.positions: list[Any] = pytree.tree_map_only(Tensor, Tensor.detach, found)

    def start(self, rows: int) -> list[Tensor]:
        """The state before the first position of `rows` rows."""
        config, like = self.model.config, self.backbone.like
        memory = like.new_zeros(config.n_layer, rows, 2, config.n_head, 0, config.d_head)
        state = {"memory": memory, "valid": like.new_zeros(rows, dtype=torch.long)}
        state["tokens"] = self.model.empty_memory(rows, self.lengths).tokens
        return [state[name] for name in self.names[1:]]

    def forward(self, given: Int[Tensor, "B T"] | Vectors, memory: Float[Tensor, "N B 2 H M K"], *more: Tensor) -> Any:
        """Log-probabilities [B, T, V] after ids, or the last outputs [B, T, D] after vectors; then the next state."""
        state = dict(zip(self.names[2:], more, strict=True))
        cache = _ValueCache(
            list(memory.unbind(0)),
            self.lengths,
            memory.shape[4],
            state.get("valid"),
            positions=self.positions,
            tokens=state.get("tokens"),
        )
        if isinstance(self.model, TransformerXL):
            result, after = self.model.log_probs(given, cache, self.lengths)
        else:
            outputs, after = self.backbone(given, cache, self.lengths)
            result = outputs[-1]
        found = {"memory": torch.stack(after.buffers), "valid": after.valid, "tokens": after.tokens}
        return result, *(found[name] for name in self.names[1:])

    @cached_property
    def program(self) -> ExportedProgram:
        """The graph of a call, for any number of rows, and any lengths of segment and memory."""
        config = self.model.config
        memory, *more = self.start(_ROWS)
        memory = memory.new_zeros(*memory.shape[:4], _PAST, config.d_head)
        given = memory.new_zeros(_ROWS, _QUERIES, dtype=torch.long)
        if self.names[0] == "vectors":
            given = memory.new_zeros(_ROWS, _QUERIES, config.d_model)
        dynamic = pytree.tree_map_only(str, lambda _: Dim.DYNAMIC, self._axes())
        with torch.no_grad():
            return torch.export.export(self, (given, memory, *more), dynamic_shapes=dynamic)

    def _axes(self) -> tuple[Any, ...]:
        """The names of the axes of the inputs that have any length."""
        first, more = ({0: "rows", 1: "length"}, {1: "rows", 4: "past"}), len(self.names) - 2
        return (*first, ({0: "rows"},) * more) if more else first

    def write_onnx(self, path: str | Path) -> None:
        """Write the graph as an ONNX file, with the lengths as its metadata."""
        result = "log_probs" if self.names[0] == "ids" else "outputs"
        with _quiet():
            graph = torch.onnx.export(
                self.program,
                input_names=self.names,
                output_names=[result, *(f"next_{name}" for name in self.names[1:])],
                dynamic_shapes=self._axes(),
                dynamo=True,
                verbose=False,
            )
        assert graph is not None, "a program with dynamo is returned"
        graph.model.metadata_props.update({name: json.dumps(value) for name, value in asdict(self.lengths).items()})
        graph.save(path)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' warnings, which say nothing about the result."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def export_onnx(loaded: LoadedModel, lengths: Lengths, folder: str | Path, *, int8: bool = False) -> None:
    """Write a folder with `model.onnx` and `vocab.json`, a `Vocab`. After an error nothing is changed.

    Args:
        int8: round the weights of products to 8 bits, and inputs of products in each call ("dynamic quantisation").

    Raises:
        Mistake: the model's memory has another form, or a package is missing.
    """
    for name in ("onnx", "onnxscript", *(["onnxruntime"] if int8 else [])):
        if find_spec(name) is None:
            raise Mistake(f"--to-format onnx needs the package {name}: pip install onnx onnxscript onnxruntime.")
    if context := loaded.config.context_len(lengths):
        raise Mistake(
            f"eval.context_len must be 0 for ONNX, whose graphs read no token twice, got {context:,}. Give "
            "--eval.context-len 0, and a memory by --eval.mem-len."
        )
    with whole_folder(Path(folder)) as unfinished:
        path = unfinished / "model.onnx"
        Stream(loaded.model, lengths).write_onnx(path)
        if int8:
            from onnxruntime.quantization import QuantType, quantize_dynamic

            with _quiet():  # signed weights overflow on processors without VNNI
                quantize_dynamic(path, path, weight_type=QuantType.QUInt8)
        write_json(unfinished / "vocab.json", loaded.vocab.to_json())
