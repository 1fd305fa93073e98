"""The process of a contender, in the Python of this environment or another one.

It reads requests and answers them, one JSON object a line. The output of libraries goes to standard error.

    {"do": "prepare", "key": k, "module": "benchmarks.ours", "name": "Ours", "job": {...}}
                                             {} or {"refused": why}
    {"do": "run", "key": k, "times": 3}      {"seconds": of one}
    {"do": "peak", "key": k}                 {"bytes": above those at the start and `kept_bytes`}
    {"do": "call", "key": k, "name": "nll", "arguments": {...}}                    {"value": what that method returns}
    {"do": "release"}                        {}

An answer {"error": ...} reports an exception. A contender is a class in a module, made from a job:

    run()                     one unit of work, or seconds() if it reads the clock itself
    kept_bytes (optional)     bytes that stay in use: inputs, or weights, gradients and optimizer state

A contender may also be a language model, which `LanguageWork` runs.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from .measure import first_step, peak_memory, restart_peak, seconds_each, used_cuda


class Worker:
    """The contenders prepared in this process, by key, and the answers to requests."""

    def __init__(self) -> None:
        self.prepared: dict[str, Any] = {}
        self.before: dict[str, tuple[str, int]] = {}
        """For each key: its device, and the bytes in use before it was prepared."""

    def prepare(self, key: str, module: str, name: str, job: dict[str, Any]) -> dict[str, Any]:
        try:
            contender = getattr(import_module(module), name)
        except ImportError as error:
            return {"refused": str(error)}
        self.prepared.pop(key, None)
        gc.collect()
        if job.get("part") == "train":
            first_step()
        device = job.get("device", "cpu")
        self.before[key] = device, restart_peak(device)
        try:
            self.prepared[key] = contender(job)
        except NotImplementedError as refusal:
            return {"refused": str(refusal)}
        if hasattr(contender, "score"):
            self.prepared[key] = LanguageWork(self.prepared[key], job)
        restart_peak(device)
        return {}

    def run(self, key: str, times: int) -> dict[str, Any]:
        work = self.prepared[key]
        if hasattr(work, "seconds"):
            return {"seconds": work.seconds()}
        return {"seconds": seconds_each(work.run, times)}

    def peak(self, key: str) -> dict[str, Any]:
        device, before = self.before[key]
        return {"bytes": peak_memory(device) - before - getattr(self.prepared[key], "kept_bytes", 0)}

    def call(self, key: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"value": getattr(self.prepared[key], name)(**arguments)}

    def release(self) -> dict[str, Any]:
        self.prepared.clear()
        gc.collect()
        if cuda := used_cuda():
            cuda.empty_cache()
        return {}


class LanguageWork:
    """A language model that trains steps, evaluates segments or reads single tokens, with a full memory.

    The model has `module`, a torch module; `state(batch, length)`, the state after a text of that length, for instance
    zeros; `score(ids, targets, state)`, the nats of each target [B, T] and the next state; `following(ids, state)`, the
    log-probabilities after the last token [B, V] and the next state; and maybe `learn(ids, targets, state)`, one
    optimizer step that returns the next state.
    """

    def __init__(self, model: Any, job: dict[str, Any]) -> None:
        import torch

        self.torch, self.model, self.job = torch, model, job
        self.training = job["part"] == "train"
        if job["precision"] == "tf32":
            torch.set_float32_matmul_precision("high")
        raw = torch.frombuffer(bytearray(Path(job["ids"]).read_bytes()), dtype=torch.int64)
        self.text = raw.view(job["rows"], -1)[: job["batch"]].to(job["device"])
        self.position = 0
        weights = sum(p.numel() * p.element_size() for p in model.module.parameters())
        self.kept_bytes = weights * (4 if self.training else 1)  # Adam keeps two numbers a weight
        model.module.train(self.training)
        torch.manual_seed(1)
        if self.training and not hasattr(model, "learn"):
            settings = job["train"]
            betas = tuple(settings["betas"])
            self.optimizer = torch.optim.Adam(
                model.module.parameters(), settings["lr"], betas=betas, eps=settings["epsilon"], fused=True
            )
        self.next_ids = self.text[:, :1]
        with self._reading():
            self.state = model.state(job["batch"], job["mem_len"])

    def run(self) -> None:
        if self.training:
            ids, targets = self._segment(self.job["tgt_len"])
            learn = getattr(self.model, "learn", self._learn)
            self.state = learn(ids, targets, self.state)
            return
        with self._reading():
            if self.job["part"] == "eval":
                ids, targets = self._segment(self.job["tgt_len"])
                _, self.state = self.model.score(ids, targets, self.state)
            else:
                log_probs, self.state = self.model.following(self.next_ids, self.state)
                self.next_ids = log_probs.argmax(-1, keepdim=True)

    def nll(self, pieces: list[int]) -> list[float]:
        """Nats of the first tokens of the text from an empty state, without dropout, in calls of these lengths."""
        self.position, found = 0, []
        self.model.module.eval()
        with self._reading():
            state = self.model.state(self.job["batch"], 0)
            for length in pieces:
                ids, targets = self._segment(length)
                if length == 1:
                    log_probs, state = self.model.following(ids, state)
                    found.append(-log_probs.gather(1, targets))
                else:
                    nll, state = self.model.score(ids, targets, state)
                    found.append(nll)
        self.model.module.train(self.training)
        return self.torch.cat(found, 1).float().flatten().tolist()

    def _learn(self, ids: Any, targets: Any, state: Any) -> Any:
        self.optimizer.zero_grad()
        with self._autocast():
            nll, state = self.model.score(ids, targets, state)
        nll.mean().backward()
        parameters = self.model.module.parameters()
        self.torch.nn.utils.clip_grad_norm_(parameters, self.job["train"]["clip"] or math.inf)
        self.optimizer.step()
        return state

    def _segment(self, length: int) -> tuple[Any, Any]:
        if self.position + length >= self.text.shape[1]:
            self.position = 0
        window = self.text[:, self.position : self.position + length + 1]
        self.position += length
        return window[:, :-1], window[:, 1:]

    @contextlib.contextmanager
    def _reading(self):
        with self.torch.no_grad(), self._autocast():
            yield

    def _autocast(self) -> Any:
        half = {"bf16": self.torch.bfloat16, "fp16": self.torch.float16}.get(self.job["precision"])
        return self.torch.autocast(self.text.device.type, dtype=half, enabled=half is not None)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
