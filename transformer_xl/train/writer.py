"""Work that goes on aside while training does: the writing of a checkpoint, from copies that training leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import torch
from torch import Tensor

from .parallel import whole


class Snapshot:
    """Copies of tensors on the CPU, whole, in memory that is kept for the next ones of the same names: to ask for new
    memory takes longer than to copy. Ranks that keep none have to take part in every copy all the same."""

    def __init__(self, kept: bool = True):
        self.kept = kept
        self._copies: dict[str, Tensor] = {}

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """A copy that holds until the next one under this name."""
        full = whole(tensor.detach())
        if not self.kept:
            return full.new_empty(0)
        copy = self._copies.get(name)
        if copy is None or (copy.shape, copy.dtype) != (full.shape, full.dtype):
            # Pinned, a copy from a GPU takes a fraction of the time.
            copy = self._copies[name] = torch.empty(full.shape, dtype=full.dtype, pin_memory=full.is_cuda)
        return copy.copy_(full)


class Aside:
    """One piece of work at a time in a thread of its own. What it raises is raised where training next asks.

    Use it in a `with`: an error there waits for the work, a second signal does not, and what was being written is then
    half-written, and swept up as such.
    """

    def __init__(self, *, kept: bool = True) -> None:
        self._snapshot = Snapshot(kept)
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Aside:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            self.wait()
        elif self._thread is not None and isinstance(error, Exception):
            self._thread.join()
            if self._error is not None:
                error.add_note(str(self._error))

    def snapshot(self) -> Snapshot:
        """Where copies for the next work go, when the work before is done with its own."""
        self.wait()
        return self._snapshot

    def begin(self, work: Callable[[], object]) -> None:
        """Have `work` done, when what was begun before is."""
        self.wait()
        self._thread = Thread(target=self._do, args=(work,), daemon=True)
        self._thread.start()

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raise what the work raised, if it has ended so."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Until all is done."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
