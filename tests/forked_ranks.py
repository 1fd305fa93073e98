"""`python tests/forked_ranks.py RANKS RESTARTS SCRIPT ARGUMENTS`: torchrun, but its ranks are forks of it.

A rank then imports nothing again, which takes three seconds of a processor.
"""

from __future__ import annotations

import runpy
import signal
import sys
from importlib import import_module

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def start(*words: str) -> None:
    """What a rank does: it runs the script, with the signals of a new process."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [*words]
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    for name in ("torch._dynamo", "torch.distributed.fsdp", "ranks", "transformer_xl.train.start"):
        import_module(name)
    _, count, restarts, *words = sys.argv
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(count),
        max_restarts=int(restarts),
        start_method="fork",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        monitor_interval=0.1,
    )
    elastic_launch(config, start)(*words)
