"""`python -m experiments.export RUN`: a byte or word model exported to ONNX beside PyTorch, in fp32 on this CPU.

The size of the files, the largest difference of log-probabilities, the loss over the beginning of the test set with
fp32 and with int8 weights, and tokens per second: segments of 8 rows, and one token at a time. PyTorch reads with its
cache, and single tokens with the step that `txl generate` takes. Speeds are medians of alternating turns.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from transformer_xl.evaluation.score import figure
from transformer_xl.interop.onnx import Stream, export_onnx
from transformer_xl.model.step import Step, step_state
from transformer_xl.run.trained import TrainedRun

ROWS, SEGMENTS, SINGLE, TURNS = 8, 40, 300, 5
Read = Callable[[Tensor, Any], tuple[Tensor, Any]]


def reader(session: Any) -> Read:
    """A call of a graph, as a call of the model."""
    names = [each.name for each in session.get_inputs()]

    def read(ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        log_probs, *after = session.run(None, dict(zip(names, [ids.numpy(), *state], strict=True)))
        return torch.from_numpy(log_probs), after

    return read


def read_all(read: Read, state: Any, ids: Tensor, length: int) -> tuple[float, Tensor, Any]:
    """The mean loss in nats of a text in segments, the last log-probabilities, and the state."""
    total, inputs, targets = 0.0, ids[:, :-1], ids[:, 1:]
    for segment, wanted in zip(inputs.split(length, 1), targets.split(length, 1), strict=True):
        log_probs, state = read(segment, state)
        total -= log_probs.gather(2, wanted[..., None]).sum(dtype=torch.float64).item()
    return total / targets.numel(), log_probs, state


def speed(run: Callable[[], object], tokens: int) -> float:
    start = time.perf_counter()
    run()
    return tokens / (time.perf_counter() - start)


def main(run: str) -> None:
    trained = TrainedRun(run, "cpu", "fp32")
    loaded, lengths = trained.load(), trained.config.eval_lengths
    text = trained.text(loaded.vocab, None, "test", "test").ids[: ROWS * (SEGMENTS * lengths.tgt_len) + ROWS]
    ids = torch.from_numpy(np.asarray(text, np.int64)[: len(text) // ROWS * ROWS].reshape(ROWS, -1).copy())
    model, stream = loaded.model.for_inference(), Stream(loaded.model, lengths)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        reads: dict[str, Read] = {"PyTorch": lambda ids, state: model.log_probs(ids, state, lengths)}
        sizes = {"PyTorch": 4 * sum(weight.numel() for weight in loaded.model.parameters())}
        for name in ("ONNX", "ONNX, int8"):
            export_onnx(loaded, lengths, Path(folder, name), int8="int8" in name)
            path = Path(folder, name, "model.onnx")
            sizes[name], reads[name] = path.stat().st_size, reader(onnxruntime.InferenceSession(path, options))

        def start(name: str, rows: int) -> Any:
            own = [each.numpy() for each in stream.start(rows)]
            return model.empty_cache(rows, lengths) if name == "PyTorch" else own

        def single(name: str, state: Any) -> None:
            past = step_state(model, state, lengths) if name == "PyTorch" else state
            for token in ids[:1, :SINGLE].unbind(1):
                if isinstance(past, Step):
                    past(token[None])
                else:
                    _, past = reads[name](token[None], past)

        found = {name: read_all(read, start(name, ROWS), ids, lengths.tgt_len) for name, read in reads.items()}
        speeds: dict[str, list[list[float]]] = {name: [[], []] for name in reads}
        part = ids[:, : 10 * lengths.tgt_len + 1]
        for _ in range(TURNS):
            for name, read in reads.items():
                call = lambda name=name, read=read: read_all(read, start(name, ROWS), part, lengths.tgt_len)  # noqa: E731
                speeds[name][0].append(speed(call, part[:, 1:].numel()))
                _, _, state = read_all(read, start(name, 1), ids[:1, : 4 * lengths.tgt_len + 1], lengths.tgt_len)
                speeds[name][1].append(speed(lambda name=name, state=state: single(name, state), SINGLE))
    print(f"{run}: {lengths}, {ids[:, 1:].numel():,} targets of the test set, {torch.get_num_threads()} threads")
    for name, (loss, log_probs, _) in found.items():
        unit, value = figure(loaded.vocab.unit, loss)
        apart = (log_probs - found["PyTorch"][1]).abs().max()
        fast, slow = (statistics.median(each) for each in speeds[name])
        print(
            f"{name:12} {sizes[name] / 1e6:7.2f} MB  {value:9.4f} {unit}  differs by {apart:.1e}  "
            f"{fast:9,.0f} tokens/s in segments  {slow:7,.0f} one at a time"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
