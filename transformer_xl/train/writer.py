"""Writes checkpoints in the background while training continues, from copies that training does not change."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from threading import Thread

import torch
from torch import Tensor

from .parallel import whole


class BackgroundWriter(AbstractContextManager["BackgroundWriter"]):
    """Does one piece of work at a time in a thread. The next call from training raises its exceptions.

    Use it in a `with`: on an error it waits for the work. On a second signal it does not wait; the next run
    removes the unfinished file. With `kept` False it keeps no copies, but takes part in gathering each tensor.
    """

    def __init__(self, *, kept: bool = True) -> None:
        self.kept = kept
        self._copies: dict[str, Tensor] = {}
        self._work: Future[object] | None = None
        self._thread: Thread = Thread()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            self.wait()
        elif isinstance(error, Exception) and self._work is not None and (failure := self._work.exception()):
            error.add_note(str(failure))

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """A whole copy on the CPU, in the memory of the last copy of this name, because allocating costs more than
        copying. Call `wait` before, because the work may still read that copy."""
        full = whole(tensor.detach())
        if not self.kept:
            return full.new_empty(0)
        copy = self._copies.get(name)
        if copy is None or (copy.shape, copy.dtype) != (full.shape, full.dtype):
            # A copy from a GPU to pinned memory takes a fraction of the time.
            copy = self._copies[name] = torch.empty(full.shape, dtype=full.dtype, device="cpu", pin_memory=full.is_cuda)
        return copy.copy_(full)

    def begin(self, work: Callable[[], object]) -> None:
        """Start `work` after the previous work is done."""
        self.wait()
        self._work = Future()
        self._thread = Thread(target=_do, args=(work, self._work), daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the work's exception, if there is one."""
        if self._work is not None and self._work.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the work is done."""
        work, self._work = self._work, None
        if work is not None:
            try:
                work.result()
            finally:
                self._thread.join()  # a process that ends before it may abort


def _do(work: Callable[[], object], done: Future[object]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)
