"""Writes checkpoints in the background while training continues, from copies that training does not change."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import torch
from torch import Tensor

from .parallel import whole


class Snapshot:
    """Copies whole tensors to the CPU, into the memory of earlier copies, because allocating costs more than copying.

    A rank with `kept` False keeps no copies, but takes part in gathering each tensor."""

    def __init__(self, kept: bool = True):
        self.kept = kept
        self._copies: dict[str, Tensor] = {}

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """A copy, valid until the next call with this name."""
        full = whole(tensor.detach())
        if not self.kept:
            return full.new_empty(0)
        copy = self._copies.get(name)
        if copy is None or (copy.shape, copy.dtype) != (full.shape, full.dtype):
            # A copy from a GPU to pinned memory takes a fraction of the time.
            copy = self._copies[name] = torch.empty(full.shape, dtype=full.dtype, pin_memory=full.is_cuda)
        return copy.copy_(full)


class BackgroundWriter:
    """Does one piece of work at a time in a thread. The next call from training raises its exceptions.

    Use it in a `with`: on an error it waits for the work. On a second signal it does not wait; the next run
    removes the unfinished file.
    """

    def __init__(self, *, kept: bool = True) -> None:
        self._snapshot = Snapshot(kept)
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            self.wait()
        elif self._thread is not None and isinstance(error, Exception):
            self._thread.join()
            if self._error is not None:
                error.add_note(str(self._error))

    def snapshot(self) -> Snapshot:
        """The snapshot for the next work, after the work that uses its copies is done."""
        self.wait()
        return self._snapshot

    def begin(self, work: Callable[[], object]) -> None:
        """Start `work` after the previous work is done."""
        self.wait()
        self._thread = Thread(target=self._do, args=(work,), daemon=True)
        self._thread.start()

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raise the work's exception, if there is one."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Wait until all work is done."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
