"""Ranks: the processes that train one model together, as torchrun starts them. Alone, a process is rank 0 of 1.

Each rank reads its rows of every batch and keeps their memories. All ranks hold the same weights (DDP), or each rank
holds a shard of every tensor and gathers the whole when it needs it (FSDP2); the optimizer's results are the same.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from ..mistake import Mistake
from .launcher import launch_warning, rank_and_size, variable

LONGEST_SUM, LONGEST_WAIT = timedelta(hours=1), timedelta(weeks=1)
"""After these a sum over ranks, and the wait for the first, end with an error."""


@dataclass(frozen=True)
class Ranks:
    """This process's rank and the number of ranks. Every rank has to call each method that waits."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    def rows(self, count: int) -> slice:
        """This rank's share of `count` rows: consecutive shares, which differ by at most one row."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def total(self, amounts: Sequence[float]) -> list[float]:
        """Sums over all ranks, in float64."""
        if self.size == 1:
            return list(amounts)
        summed = torch.tensor(amounts, dtype=torch.float64)  # on the CPU, because reading a device waits for it
        dist.all_reduce(summed)
        return summed.tolist()

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in their order; all have the same shape."""
        if self.size == 1:
            return [tensor]
        found = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(found, tensor.contiguous())
        return found

    def wait(self) -> None:
        """Wait for all ranks, without a barrier, because a barrier would start NCCL."""
        self.total([0.0])

    def wait_for_first(self) -> None:
        """Wait until the first rank calls this, too. It may prepare a text for longer than a sum may take."""
        if self.size > 1:
            _set_pg_timeout(LONGEST_WAIT)
            self.wait()
            _set_pg_timeout(LONGEST_SUM)


def launch_id() -> str:
    """An id that all processes of one torchrun share, also after a restart; "" without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if name != "none":
        return name
    started = ""
    with suppress(OSError):  # Linux says when the launcher started; numbers of processes recur
        started = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    return f"process {os.getppid()} {started}"


@contextmanager
def join_ranks(device: str) -> Iterator[Ranks]:
    """Join the other ranks until the block ends; on CUDA each rank takes the device of its local rank.

    Raises `ConnectionError` if another rank ends.
    """
    if warning := launch_warning():
        print(warning, file=sys.stderr)
    ranks = Ranks(*rank_and_size())
    if ranks.size == 1:
        yield ranks
        return
    if device == "mps":
        raise Mistake("device must not be mps with several ranks, because gloo cannot add its numbers. Use cpu.")
    cuda = torch.cuda.is_available() and (device == "auto" or device.startswith("cuda"))
    if cuda:
        _take_device(device)
    try:
        store = _meet(ranks)
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size, timeout=LONGEST_SUM)
        yield ranks
        _wait_for_gloo()
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        if not ranks.first:  # one message is enough
            raise SystemExit(1) from error
        why = "Another rank has ended, or has not answered for an hour."
        raise ConnectionError(f"{why} Its output, or the launcher's, names the reason.") from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _meet(ranks: Ranks) -> Store:
    """The store through which ranks find each other. A minute of waiting is reported."""
    restarts = variable("TORCHELASTIC_MAX_RESTARTS")
    if variable("GROUP_WORLD_SIZE") > 1 and restarts and os.environ.get("TORCHELASTIC_RUN_ID") == "none":
        raise Mistake("torchrun must get --rdzv-id to restart on several machines. Give one name on all of them.")
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    line = f"txl: Waiting for {ranks.size} ranks at {where}. To train in one process, unset RANK and WORLD_SIZE."
    waits = threading.Timer(60, print, [line], {"file": sys.stderr, "flush": True})
    waits.daemon = True
    waits.start()
    try:
        store, *_ = next(rendezvous("env://"))
    finally:
        waits.cancel()
    if os.environ.get("GROUP_WORLD_SIZE") != "1":
        return store
    # torchrun keeps its store through restarts, with the addresses of processes that have ended. The number of restarts
    # is known on one machine only; several machines need a new store each time.
    return PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)


def _wait_for_gloo() -> None:
    """Wait until gloo's threads have released Python's tensors, because a release while the interpreter ends aborts the
    process (https://github.com/pytorch/pytorch/issues/190489). So many sums at once reach each of its threads."""
    last, end = [torch.zeros(1) for _ in range(16)], time.monotonic() + 5
    own = last[0]._use_count()  # type: ignore[attr-defined]
    sums = [dist.all_reduce(each, async_op=True) for each in last]
    while sums:
        sums.pop().wait()  # type: ignore[union-attr]  # and no name keeps it, because it holds its tensor
    while max(each._use_count() for each in last) > own and time.monotonic() < end:  # type: ignore[attr-defined]
        time.sleep(0.001)


def _take_device(device: str) -> None:
    local, there = variable("LOCAL_RANK"), torch.cuda.device_count()
    if ":" in device:
        raise Mistake(f"device must be auto or cuda with several ranks: each rank has its own device; got {device}.")
    if local >= there:
        raise Mistake(f"There must be a CUDA device for each rank of a machine, got {there}. Start fewer ranks.")
    torch.cuda.set_device(local)
