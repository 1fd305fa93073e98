"""`txl env`: facts about this machine, the choices for it with reasons, and the check of a card."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from datetime import date
from typing import Any

from ..config.settings import TrainConfig, TransformerXLConfig
from ..mistake import Mistake
from ..runtime.files import below_home
from ..runtime.terminal import show_pairs


@dataclass(frozen=True)
class Env:
    """Print the hardware and versions of this machine, and what `auto` chooses on it, with reasons."""

    check: bool = False
    """First compare the fused kernels with float64 on each kind of CUDA device, in one or two minutes. `auto` trains
    with them only on a card where they passed, with the same versions and source."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> None:
        import torch

        from ..data.datasets import cache_folder
        from ..ops import resolve_backend
        from ..run.folder import environment
        from ..runtime.device import PRECISIONS
        from ..train.choices import choices

        if self.check:
            check_cards()
        model = TransformerXLConfig(vocab_size=0)
        auto = choices(TrainConfig(), model)
        device = torch.device(auto["device"]["name"])
        dtype = PRECISIONS[auto["precision"]["name"]]
        call = {"training": False, "scores": 0, "queries": TrainConfig().tgt_len}
        name, why = resolve_backend("auto", device, dtype, model.d_head, **call)
        auto["backend for inference"] = {"name": name, "why": why}
        facts = environment() | {"auto": auto, "cache": below_home(cache_folder())}
        if self.json:
            print(json.dumps(facts, indent=2))
            return
        shown = {name.replace("_", " "): _words(value) for name, value in facts.items() if name != "auto"}
        titles = {"backend": "backend at the default sizes"}
        chosen = {titles.get(name, name): f"{choice['name']}: {choice['why']}" for name, choice in auto.items()}
        show_pairs("this machine", shown)
        show_pairs("what would run with `auto`, and why", chosen)


def check_cards() -> None:
    """Run the contract of the fused kernels on one CUDA device of each kind, and keep the verdicts for `auto`.

    Raises:
        Mistake: there is no CUDA device, or the kernels cannot run on it.
    """
    import torch

    from ..ops import choice, testing
    from ..runtime.device import resolve_device
    from ..runtime.files import write_whole

    first = resolve_device("auto")
    refusal = choice.triton_refusal(first, torch.float32, 64)
    if refusal:
        raise Mistake(f"--check needs a CUDA device and Triton: {refusal}. Leave --check out on this machine.")
    files = set()
    for device in [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or [first]:
        facts, start = choice.card(device), time.monotonic()
        file = choice.verdict_file(facts)
        if file in files:
            continue
        files.add(file)
        print(f"Comparing the fused kernels with float64 on {facts['card']} ...", file=sys.stderr, flush=True)
        why = testing.fault_of("triton", str(device))
        found = {"why": why, "date": date.today().isoformat(), "seconds": round(time.monotonic() - start, 1)}
        write_whole(file, json.dumps(facts | found, indent=2) + "\n")
        ended = "They passed" if why is None else f"They failed ({why})"
        print(f"{ended}, after {found['seconds']:.0f} s. Kept in {below_home(file)}.", file=sys.stderr)
    choice.read_verdict.cache_clear()


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
