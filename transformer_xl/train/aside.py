"""Work that goes on aside while training does: the writing of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread


class Aside:
    """One piece of work at a time in a thread of its own. What it raises is raised where training next asks.

    Use it in a `with`: an error there waits for the work, a second signal does not, and what was being written is then
    half-written, and swept up as such.
    """

    def __init__(self) -> None:
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
