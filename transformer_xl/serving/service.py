"""From a request to jobs of the engine, and from the engine's events to an answer."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..data.vocab import Vocab
from ..evaluation.generate import Sampling
from ..mistake import Mistake
from .choices import Choice, Delta
from .engine import Engine
from .requests import Completion, Limits, Refused, check_completion, prompts_of, short, stops_of
from .sessions import Sessions, new_id
from .texts import Ended, Event, Failed, Job, Past, Scored, shorter_memory


class ClientGone(Exception):
    """Nobody waits for the answer."""


class LoopCalls:
    """Calls from a thread to an event loop. Waking a loop is slow, so it is woken once for all calls that wait."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()

    def send(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if len(self._calls) == 1:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._calls:
            self._calls[0]()
            self._calls.popleft()


@dataclass
class Service:
    """What the server has: a model behind an engine, texts that can be continued, and limits."""

    name: str
    engine: Engine
    sessions: Sessions
    limits: Limits
    calls: LoopCalls = field(default_factory=LoopCalls)

    @property
    def vocab(self) -> Vocab:
        return self.engine.vocab

    def plan(self, asked: Completion, owner: str, client: str) -> Answer:
        """The answer to a request, of which nothing is computed yet.

        Raises:
            Refused: a field is wrong.
        """
        if asked.model not in (None, self.name):
            message = f"There is no model {short(asked.model)}; this server has {self.name}."
            raise Refused(404, message, "model", "model_not_found")
        check_completion(asked, self.limits, self.engine.lengths)
        past = self._past(asked, owner)
        stops = stops_of(asked.stop, self.limits)
        draw = {name: getattr(asked, name) for name in ("temperature", "top_k", "top_p", "seed")}
        sampling = Sampling(stop=stops, **draw)
        prompts = prompts_of(asked.prompt, self.limits, len(self.vocab))
        answer = Answer(self, asked, owner)
        for prompt in prompts:
            ids, leads = self._ids(prompt, past)
            text = (prompt if isinstance(prompt, str) else self.vocab.decode(prompt)) if asked.echo else None
            answer.add(ids, past, sampling, leads=leads, echo=text, client=client)
        return answer

    def _past(self, asked: Completion, owner: str) -> Past | None:
        if asked.previous_response_id is None:
            return None
        past = self.sessions.get(asked.previous_response_id, owner)
        if past is None:
            message = "There is no response with this previous_response_id, or no longer. Send the whole text."
            raise Refused(404, message, "previous_response_id", "response_not_found")
        return past

    def _ids(self, prompt: str | list[int], past: Past | None) -> tuple[np.ndarray, bool]:
        """The ids to read, and whether the first of them belongs to the prompt.

        A text that starts here comes after a line end, as in `txl score`; ids are read as they are.
        """
        vocab = self.vocab
        try:
            ids = np.asarray(vocab.encode(prompt) if isinstance(prompt, str) else prompt, dtype=np.int64)
        except Mistake as error:
            raise Refused(400, str(error), "prompt") from error
        if len(ids) > self.limits.prompt_tokens:
            most = f"{self.limits.prompt_tokens:,}"
            raise Refused(400, f"prompt must be at most {most} tokens, got {len(ids):,}.", "prompt")
        if past is not None:
            return np.array([past.last, *ids]), False
        if isinstance(prompt, str) and (vocab.line_end is not None or not len(ids)):
            return np.array([vocab.line_end or 0, *ids]), False
        return ids, True

    def lengths_of(self, asked: Completion, past: Past | None) -> Any:
        if past is not None:
            return past.lengths
        lengths = self.engine.lengths
        return lengths if asked.mem_len is None else shorter_memory(lengths, asked.mem_len)


class Answer:
    """The answer to one request, while it is made. Used in one event loop."""

    def __init__(self, service: Service, asked: Completion, owner: str) -> None:
        self.service: Service = service
        self.asked: Completion = asked
        self.owner: str = owner
        self.jobs: list[Job] = []
        self.choices: list[Choice] = []
        self.ids: list[str] = []
        self.created: int = int(time.time())
        self.prompt_tokens: int = 0
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(
        self,
        ids: np.ndarray,
        past: Past | None,
        sampling: Sampling,
        *,
        leads: bool,
        echo: str | None,
        client: str,
    ) -> None:
        """Add a prompt."""
        asked = self.asked
        job = Job(
            ids=ids,
            past=past,
            lengths=self.service.lengths_of(asked, past),
            sampling=sampling,
            max_tokens=asked.max_tokens,
            emit=self._emitter(len(self.jobs)),
            n=asked.n,
            echo=asked.echo and asked.logprobs is not None,
            top=asked.logprobs or 0,
            client=client,
        )
        self.jobs.append(job)
        self.prompt_tokens += len(ids) - (not leads)
        for _ in range(asked.n):
            choice = Choice(self.service.vocab, ids.tolist(), leads=leads, echo=echo, scores=asked.logprobs is not None)
            self.choices.append(choice)
            self.ids.append(new_id())

    def start(self) -> None:
        """Give the jobs to the engine. Raises what `Engine.submit` raises."""
        self._loop = asyncio.get_running_loop()
        self.service.engine.submit(self.jobs)

    def cancel(self) -> None:
        """Stop the engine's work on it."""
        for job in self.jobs:
            job.cancelled = True

    def abandon(self) -> None:
        """Nobody waits: end `deltas`."""
        self.cancel()
        self._events.put_nowait((0, Failed(ClientGone())))

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """The pieces of all choices, as they come. Events that came together are one piece.

        Raises the error that ended it. However it ends, the engine has stopped its work on it.
        """
        going = len(self.choices)
        try:
            for number, choice in enumerate(self.choices):
                yield number, choice.begin()
            while going:
                found: defaultdict[int, Delta] = defaultdict(Delta)
                events = [await self._events.get()]
                while not self._events.empty():
                    events.append(self._events.get_nowait())
                for number, event in events:
                    going -= isinstance(event, Ended)
                    self._take(number, event, found)
                for index, delta in found.items():
                    yield index, delta
        finally:
            self.cancel()
            self.jobs.clear()  # they hold states, and know this answer: a cycle, which Python would collect late

    def _take(self, number: int, event: Event, found: dict[int, Delta]) -> None:
        """Add an event of prompt `number` to what was found of its choices."""
        if isinstance(event, Failed):
            raise event.error
        first = number * self.asked.n
        chosen = range(first, first + self.asked.n) if isinstance(event, Scored) else [first + event.index]
        for index in chosen:
            found[index].add(self.choices[index].take(event))
        if isinstance(event, Ended) and self.asked.store:
            self.service.sessions.add(self.ids[chosen[0]], event.past, self.owner)

    async def whole(self) -> dict[str, Any]:
        """The response in one piece."""
        wholes = [Delta() for _ in self.choices]
        async for index, delta in self.deltas():
            wholes[index].add(delta)
        return self.to_json(list(enumerate(wholes)), usage=True)

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The response in pieces."""
        async for index, delta in self.deltas():
            if delta.text or delta.finish_reason or delta.tokens:
                yield self.to_json([(index, delta)])
        if self.asked.stream_options is not None and self.asked.stream_options.include_usage:
            yield self.to_json([], usage=True)

    def to_json(self, pieces: list[tuple[int, Delta]], *, usage: bool = False) -> dict[str, Any]:
        choices = [
            {"index": index, "id": self.ids[index], **delta.to_json(self.asked.logprobs)} for index, delta in pieces
        ]
        content = {"id": self.ids[0], "object": "text_completion", "created": self.created, "model": self.service.name}
        content["choices"] = choices
        if usage:
            written = sum(choice.written for choice in self.choices)
            counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": written}
            content["usage"] = {**counts, "total_tokens": self.prompt_tokens + written}
        return content

    def _emitter(self, number: int) -> Callable[[Event], None]:
        def emit(event: Event) -> None:
            assert self._loop is not None, "start was called"
            self.service.calls.send(self._loop, partial(self._events.put_nowait, (number, event)))

        return emit
