"""Apple's GPU, without one: no tensor of float64 is on it, and every operator is one that PyTorch has for it.

Fake tensors have a device, a dtype and a shape, and no numbers. PyTorch's own list of operators says which have kernels
for MPS, or are made of others that have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from small_models import VARIANTS, small_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import launches
from transformer_xl.config.settings import Lengths, TrainConfig
from transformer_xl.data.loader import Segment
from transformer_xl.evaluation.lines import _score_batch
from transformer_xl.evaluation.score import evaluate
from transformer_xl.mistake import Mistake
from transformer_xl.model.baselines import build_model
from transformer_xl.runtime import device as devices
from transformer_xl.train.optim import build_optimizers
from transformer_xl.train.step import train_step

APPLE = torch.device("mps", 0)
KINDS: dict[str, dict[str, Any]] = {
    **VARIANTS,
    "locked dropout": {"dropout": 0.1, "locked_dropout": True, "dropout_words": 0.1},
    "documents": {"document_end": 1, "matches": (2,), "match_window": 5, "ngrams": (2,), "ngram_rows": 31},
    "shaw": {"kind": "shaw", "positions": 40},
}


class Apple(TorchDispatchMode):
    """Refuses float64 on Apple's GPU, and collects the operators that it has to run."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "_local_scalar_dense":
            return 1
        out = func(*args, **(kwargs or {}))
        found = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor) and x.device.type == "mps"]
        assert not any(x.dtype in (torch.float64, torch.complex128) for x in found), f"{func}: float64 on Apple's GPU"
        if found and func.namespace == "aten":
            self.operators.add(func._schema.name.removeprefix("aten::") + "." + func._overloadname)
        return out


@pytest.fixture(scope="module")
def known() -> set[str]:
    """The operators with a kernel for MPS, and those without any kernel of their own, by PyTorch's list."""
    import torchgen

    file = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    found, delegated = set(), {}
    for entry in yaml.load(file.read_text(), yaml.CSafeLoader):
        name = entry["func"].partition("(")[0]
        keys = {key.strip() for each in entry.get("dispatch", {}) for key in each.split(",")}
        everywhere = {
            "CompositeExplicitAutograd",
            "CompositeExplicitAutogradNonFunctional",
            "CompositeImplicitAutograd",
        }
        if "MPS" in keys or keys & everywhere or ("dispatch" not in entry and "structured_delegate" not in entry):
            found.add(name)
        elif "structured_delegate" in entry:
            delegated[name] = entry["structured_delegate"]
    found |= {name for name, real in delegated.items() if real in found}
    return {name if "." in name else f"{name}.default" for name in found}


@pytest.fixture(scope="module", autouse=True)
def guard() -> None:
    try:
        launches.add_guard("MPS")
    except Mistake as error:
        pytest.skip(str(error))


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout_p: float, scale: float) -> Tensor:
    """PyTorch's fused attention, which a build without MPS does not have for it."""
    return (q @ k.mT * scale + mask).softmax(-1) @ v


@contextmanager
def on_apple() -> Iterator[Apple]:
    fused = patch.object(torch.nn.functional, "scaled_dot_product_attention", plain_attention)
    with launches.fake_cuda(), fused, Apple() as apple:
        yield apple


class Targets:
    """Targets whose number is known, which a comparison of fake tensors does not tell."""

    def __init__(self, ids: Tensor):
        self.ids = ids

    def __ge__(self, least: int) -> Targets:
        return self

    def __getitem__(self, scored: Targets) -> Tensor:
        return self.ids.flatten()

    def to(self, device: torch.device) -> Tensor:
        return self.ids.to(device)


def forward_backward(objective: Any, _: str, factor: Tensor, call: Any, counts: Any, progress: float) -> Any:
    """`train.replay.forward_backward` without PyTorch's engine, which needs a device."""
    loss, nll, memory = objective(*call, counts=counts, progress=progress)
    launches.backward(loss * factor, objective)
    return nll.detach(), memory


@pytest.mark.unchecked  # `Targets`
@pytest.mark.parametrize(("kind", "optimizer"), [*((kind, "adam") for kind in KINDS), ("post-norm", "muon")])
def test_a_model_trains_scores_and_writes_on_apples_gpu(kind: str, optimizer: str, known: set[str]) -> None:
    train = TrainConfig(
        tgt_len=12, mem_len=16, batch_size=4, optimizer=optimizer, momentum=0.9, device="mps", precision="fp32"
    )
    ids = torch.zeros(4, 12, dtype=torch.int64)
    lines = [torch.zeros(n, dtype=torch.int64).numpy() for n in (20, 14)]
    with on_apple() as apple:
        with APPLE:
            model = build_model(small_config(n_layer=1, **KINDS[kind]), backend="strided").train()
        if model.ngrams is not None:
            model.ngrams.table.sparse = False
        memory = model.empty_memory(4, train.lengths)
        optimizers = build_optimizers(model, train)
        for _ in range(2):
            _, memory = train_step(model, optimizers, Segment(ids, ids, None), memory, train, 3, run=forward_backward)
        lengths = Lengths(tgt_len=12, mem_len=16, attn_len=14)
        evaluate(model, [Segment(ids, Targets(ids), None)] * 2, lengths)
        with torch.no_grad():
            _score_batch(model.for_inference(), lines, lengths, context_len=0)
            state = model.empty_cache(4, lengths)
            for length in (5, 1, 1):
                log_probs, state = model.log_probs(ids[:, :length].to(APPLE), state, lengths, last=1)
        assert log_probs.device == APPLE
    assert not apple.operators - known, "operators that Apple's GPU lacks"
    assert "_scaled_dot_product_attention_math_for_mps.default" in known
    assert len(apple.operators) > 40


def test_auto_finds_apples_gpu_and_adds_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.sums_on(APPLE) == torch.device("cpu")
    with pytest.raises(Mistake, match="torch finds no other here, got 'mps'"):
        devices.resolve_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert devices.resolve_device("auto").type == devices.resolve_device("mps").type == "mps"
    assert devices.resolve_precision("auto", APPLE)[0] == "fp32"
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    assert devices.resolve_device("auto").type == "cpu"
