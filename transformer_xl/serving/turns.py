"""A queue in which clients take turns, so one with many jobs does not delay the others."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

from .texts import Job


class Turns:
    """Jobs in the order of arrival of each client; clients in turn."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, deque[Job]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def add(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._clients.setdefault(job.client, deque()).append(job)

    def next(self) -> Job | None:
        """Remove the next job that was not cancelled; None if there is none. Its client goes to the end."""
        while self._clients:
            client, jobs = self._clients.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._clients[client] = jobs
            if not job.cancelled:
                return job
        return None
