"""From a request to jobs of the engine, and from the engine's events to an answer, whole or piece by piece."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from ..config.settings import Lengths
from ..data.vocab import Vocab
from ..evaluation.generate import Sampling, TokenText
from ..mistake import Mistake
from .engine import Engine
from .jobs import Ended, Event, Failed, Job, Scored, Top, Wrote
from .requests import Completion, Limits, Refused, short
from .sessions import Past, Sessions, new_id, reach_of, shorter_memory

LEAST = -9999.0
"""JSON has no infinity."""
FEW = 4
"""With fewer texts each token is sent at once. To send costs about as much as to write a token, whatever is sent."""
PACE = 0.02
"""With more texts, the seconds between two pieces of an answer."""


class ClientGone(Exception):
    """Nobody waits for the answer."""


class Prompt(NamedTuple):
    """A prompt of a request."""

    ids: list[int]
    """At least one."""
    leads: bool
    """Whether the first of them belongs to the prompt. It has no log-probability."""
    echo: str | None
    """The text of the prompt, if it is wanted."""


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
            message = f"There is no model {short(asked.model or '')}; this server has {self.name}."
            raise Refused(404, message, "model", "model_not_found")
        most = self.limits.max_tokens
        if asked.max_tokens > most:
            raise Refused(400, f"max_tokens must be at most {most:,}.", "max_tokens")
        past = self._past(asked, owner)
        lengths = self._lengths(asked, past)
        prompts = [self._prompt(given, past, asked.echo) for given in asked.prompts]
        return Answer(self, asked, prompts, past, lengths, owner=owner, client=client)

    def _past(self, asked: Completion, owner: str) -> Past | None:
        if asked.previous_response_id is None:
            return None
        past = self.sessions.get(asked.previous_response_id, owner)
        if past is None:
            message = "There is no response with this previous_response_id, or no longer. Send the whole text."
            raise Refused(404, message, "previous_response_id", "response_not_found")
        return past

    def _lengths(self, asked: Completion, past: Past | None) -> Lengths:
        if asked.mem_len is None:
            return self.engine.lengths if past is None else past.lengths
        if past is not None:
            message = "mem_len is set where a text begins. Leave it out with previous_response_id."
            raise Refused(400, message, "mem_len")
        most = reach_of(self.engine.lengths)
        if asked.mem_len > most:
            raise Refused(400, f"mem_len must be from 1 to {most:,}.", "mem_len")
        return shorter_memory(self.engine.lengths, asked.mem_len)

    def _prompt(self, given: str | list[int], past: Past | None, echo: bool) -> Prompt:
        """A text that starts here comes after a line end, as in `txl score`; ids are read as they are."""
        vocab, most = self.vocab, self.limits.prompt_tokens
        if not isinstance(given, str):
            check_ids(given, vocab, "prompt")
        try:
            ids = vocab.encode(given).tolist() if isinstance(given, str) else given
        except Mistake as error:
            raise Refused(400, str(error), "prompt") from error
        if len(ids) > most:
            raise Refused(400, f"prompt must be at most {most:,} tokens, got {len(ids):,}.", "prompt")
        text = None
        if echo:
            text = given if isinstance(given, str) else vocab.decode(given)
        if past is not None:
            return Prompt([past.last, *ids], False, text)
        if isinstance(given, str) and (vocab.line_end is not None or not ids):
            return Prompt([vocab.line_end or 0, *ids], False, text)
        return Prompt(ids, True, text)


def check_ids(ids: list[int], vocab: Vocab, name: str) -> None:
    if max(ids, default=0) >= len(vocab):
        raise Refused(400, f"{name} must hold ids from 0 to {len(vocab) - 1:,}.", name)


class Answer:
    """The answer to one request, while it is made. Used in one event loop."""

    def __init__(
        self,
        service: Service,
        asked: Completion,
        prompts: list[Prompt],
        past: Past | None,
        lengths: Lengths,
        *,
        owner: str,
        client: str,
    ) -> None:
        self.service: Service = service
        self.asked: Completion = asked
        self.owner: str = owner
        self.created: int = int(time.time())
        self.prompt_tokens: int = sum(len(prompt.ids) - (not prompt.leads) for prompt in prompts)
        scores = asked.logprobs is not None
        self.choices: list[Choice] = [
            Choice(service.vocab, prompt, scores=scores) for prompt in prompts for _ in range(asked.n)
        ]
        self.ids: list[str] = [new_id() for _ in self.choices]
        stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        sampling = Sampling(
            temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p, seed=asked.seed, stop=tuple(stops)
        )
        self.jobs: list[Job] = [
            Job(
                ids=np.array(prompt.ids),
                past=past,
                lengths=lengths,
                sampling=sampling,
                max_tokens=asked.max_tokens,
                emit=partial(self._receive, number),
                n=asked.n,
                echo=asked.echo and scores,
                top=asked.logprobs or 0,
                client=client,
            )
            for number, prompt in enumerate(prompts)
        ]
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None

    def _receive(self, number: int, event: Event) -> None:
        """Take an event of prompt `number` in the engine's thread."""
        assert self._loop is not None, "start was called"
        self.service.calls.send(self._loop, partial(self._events.put_nowait, (number, event)))

    def start(self) -> None:
        """Give the jobs to the engine. Raises `QueueFull`."""
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
                if going and self.service.engine.busy >= FEW:
                    await asyncio.sleep(PACE)
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
            self.choices[index].take(event, found[index])
        if isinstance(event, Ended) and self.asked.store:
            self.service.sessions.add(self.ids[chosen[0]], event.past, self.owner)

    async def whole(self) -> dict[str, object]:
        """The response in one piece."""
        wholes = [Delta() for _ in self.choices]
        async for index, delta in self.deltas():
            wholes[index].add(delta)
        return self.to_json(list(enumerate(wholes)), usage=True)

    async def chunks(self) -> AsyncIterator[dict[str, object]]:
        """The response in pieces."""
        async for index, delta in self.deltas():
            if delta.text or delta.finish_reason or delta.tokens:
                yield self.to_json([(index, delta)])
        if self.asked.stream_options is not None and self.asked.stream_options.include_usage:
            yield self.to_json([], usage=True)

    def to_json(self, pieces: list[tuple[int, Delta]], *, usage: bool = False) -> dict[str, object]:
        content: dict[str, object] = {
            "id": self.ids[0],
            "object": "text_completion",
            "created": self.created,
            "model": self.service.name,
            "choices": [
                {"index": index, "id": self.ids[index], **delta.to_json(self.asked.logprobs)} for index, delta in pieces
            ],
        }
        if usage:
            read, written = self.prompt_tokens, sum(choice.written for choice in self.choices)
            counts = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
            content["usage"] = counts
        return content


@dataclass
class Delta:
    """A piece of a choice: text, and the log-probabilities of some tokens."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, other: Delta) -> None:
        self.text += other.text
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += other.text_offset
        self.finish_reason = other.finish_reason

    def to_json(self, logprobs: int | None) -> dict[str, object]:
        """The fields of OpenAI's choice, without its index."""
        found = None
        if logprobs is not None:
            found = {
                "tokens": self.tokens,
                "token_logprobs": self.token_logprobs,
                "top_logprobs": self.top_logprobs if logprobs else None,
                "text_offset": self.text_offset,
            }
        return {"text": self.text, "logprobs": found, "finish_reason": self.finish_reason}


class Choice:
    """One continuation of one prompt, put together from the engine's events."""

    def __init__(self, vocab: Vocab, prompt: Prompt, *, scores: bool) -> None:
        """`scores`: whether log-probabilities are wanted."""
        self.written: int = 0
        """Tokens written so far."""
        self._vocab, self._prompt, self._scores = vocab, prompt, scores
        read = prompt.ids if prompt.echo is None else prompt.ids[:1]
        self._writer = TokenText(vocab, np.array(read))
        self._read = self._offset = 0

    def begin(self) -> Delta:
        """The text of the prompt, and its first token."""
        ids, leads, echo = self._prompt
        if echo is None:
            return Delta()
        if not leads:
            return Delta(echo)
        self._offset = len(self._vocab.decode(ids[:1]))
        return Delta(echo, [token_name(self._vocab, ids[0])], [None], [None], [0])

    def take(self, event: Scored | Wrote | Ended, delta: Delta) -> None:
        """Add an event to a piece."""
        if isinstance(event, Scored):
            for log_prob, top in zip(event.log_probs.tolist(), event.tops, strict=True):
                self._read += 1
                self._score(delta, self._prompt.ids[self._read], log_prob, top)
            return
        delta.text += event.text
        if isinstance(event, Ended):
            delta.finish_reason = event.reason
            return
        self.written += 1
        self._score(delta, event.token, event.log_prob, event.top)

    def _score(self, delta: Delta, token: int, log_prob: float, top: Top) -> None:
        if not self._scores:
            return
        name = token_name(self._vocab, token)
        likely = {token_name(self._vocab, other): max(value, LEAST) for other, value in top}
        if top:
            likely[name] = max(log_prob, LEAST)  # also of a token that is not among the likeliest
        delta.tokens.append(name)
        delta.token_logprobs.append(max(log_prob, LEAST))
        delta.top_logprobs.append(likely)
        delta.text_offset.append(self._offset)
        self._offset += len(self._writer.write(token))


def token_name(vocab: Vocab, token: int) -> str:
    r"""A unique text for each token: its own, or `bytes:\xe2` if it is part of a character."""
    if vocab.is_text:
        return str(vocab.symbols[token])
    raw = vocab.token_bytes[token]
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
