"""From a request to jobs of the engine, and from the engine's events to an answer, whole or piece by piece."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from ..config.settings import Lengths
from ..data.vocab import Vocab
from ..evaluation.generate import Sampling, TokenText
from ..mistake import Mistake, shortened
from .engine import Engine
from .jobs import Ended, Event, Job, Scored, Wrote, has_room
from .requests import Completion, Limits, Refused
from .scores import Delta, TokenScores, as_json, to_json, token_name, token_starts
from .sessions import Past, Sessions, reach_of, shorter_memory

FEW = 4
"""With fewer texts each token is sent at once. To send costs about as much as to write a token, whatever is sent."""
PACE = 0.02
"""With more texts, the seconds between two pieces of an answer."""


class Prompt(NamedTuple):
    """A prompt of a request."""

    ids: list[int]
    """At least one."""
    leads: bool
    """Whether the first of them belongs to the prompt. It has no log-probability."""
    echo: str | None
    """The text of the prompt, if it is wanted. Ids may end inside a character, which is then not a part of it."""
    starts: list[int]
    """Where each token of the text begins; empty: where the text of the tokens before it ends."""

    @property
    def tokens(self) -> int:
        """The number of tokens that the client sent."""
        return len(self.ids) - (not self.leads)


@dataclass
class Service:
    """What the server has: a model behind an engine, texts that can be continued, and limits."""

    name: str
    engine: Engine
    sessions: Sessions
    limits: Limits
    held: Counter[str] = field(default_factory=Counter)
    """Values of each client's answers that are not sent yet."""

    @property
    def vocab(self) -> Vocab:
        return self.engine.vocab

    def plan(self, asked: Completion, owner: str, client: str) -> Answer:
        """The answer to a request of this client, of which nothing is computed yet.

        Raises:
            Refused: a field is wrong, or the answer would be too large.
        """
        if asked.model not in (None, self.name):
            message = f"There is no model {shortened(asked.model or '')}; this server has {self.name}."
            raise Refused(404, message, "model", "model_not_found")
        most = self.limits.max_tokens
        if asked.max_tokens > most:
            raise Refused(400, f"max_tokens must be at most {most:,}.", "max_tokens")
        if len(asked.prompts) > (most := self.engine.most // 2):  # what a client alone may have, see `has_room`
            raise Refused(400, f"prompt must hold at most {most:,} texts, got {len(asked.prompts):,}.", "prompt")
        past = self._past(asked, owner)
        lengths = self._lengths(asked, past)
        prompts = [self._prompt(given, past, asked.echo) for given in asked.prompts]
        self.check_length(sum(prompt.tokens for prompt in prompts))
        values = asked.values(len(prompts), sum(len(prompt.ids) for prompt in prompts))
        if values > self.limits.values:
            message = f"The answer must hold at most {self.limits.values:,} values, and could hold {values:,}: "
            raise Refused(400, message + "(tokens of prompts, with echo, + prompts x max_tokens) x n x (logprobs + 1).")
        return Answer(self, asked, prompts, past, lengths, owner, client, values)

    def hold(self, client: str, values: int) -> None:
        """Count the values of an answer; all may hold eight times the most of one. Raises `Refused` without room."""
        if not has_room(8 * self.limits.values, self.held.total(), self.held[client], values):
            raise Refused(
                429, "Your other answers are not complete. Read them, then try again.", code="too_many_values"
            )
        self.held[client] += values

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
        vocab = self.vocab
        if not isinstance(given, str):
            check_ids(given, vocab, "prompt")
        ids = self.encode(given) if isinstance(given, str) else given
        before = [] if past is None else past.tail
        if past is None and isinstance(given, str) and (vocab.line_end is not None or not ids):
            before = [vocab.line_end or 0]
        text = None
        if echo:
            text = given if isinstance(given, str) else "".join(map(TokenText(vocab, before).write, ids))
        return Prompt([*before[-1:], *ids], not before, text, token_starts(vocab, given, ids))

    def encode(self, text: str) -> list[int]:
        """The ids of a text. Raises `Refused` if it cannot be read, or is too long."""
        try:
            ids = self.vocab.encode(text).tolist()
        except Mistake as error:
            raise Refused(400, str(error), "prompt") from error
        self.check_length(len(ids))
        return ids

    def check_length(self, read: int) -> None:
        if read > (most := self.limits.prompt_tokens):
            raise Refused(400, f"prompt must be at most {most:,} tokens in all, got {read:,}.", "prompt")


def check_ids(ids: list[int], vocab: Vocab, name: str) -> None:
    if max(ids, default=0) >= len(vocab):
        raise Refused(400, f"{name} must hold ids from 0 to {len(vocab) - 1:,}.", name)


@dataclass(eq=False)
class Answer:
    """The answer to one request, while it is made. Used in one event loop."""

    service: Service
    asked: Completion
    prompts: list[Prompt]
    past: InitVar[Past | None]
    lengths: InitVar[Lengths]
    owner: str
    client: str
    values: int
    """What `Service.hold` counts for it."""
    written: int = 0
    """Tokens written so far."""

    def __post_init__(self, past: Past | None, lengths: Lengths) -> None:
        asked, prompts, vocab = self.asked, self.prompts, self.service.vocab
        self.created: int = int(time.time())
        self.prompt_tokens: int = sum(prompt.tokens for prompt in prompts)
        self.ids: list[str] = [f"cmpl-{secrets.token_urlsafe(24)}" for _ in prompts for _ in range(asked.n)]
        bias = tuple(sorted((int(name), number) for name, number in (asked.logit_bias or {}).items()))
        check_ids([i for i, _ in bias], vocab, "logit_bias")
        stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        sampling = Sampling(
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            seed=asked.seed,
            stop=tuple(stops),
            bias=bias,
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
                echo=asked.echo and asked.logprobs is not None,
                top=asked.logprobs or 0,
                store=asked.store,
                client=self.client,
            )
            for number, prompt in enumerate(prompts)
        ]
        before = [] if past is None else past.tail[:-1]
        self._read = [
            TokenScores(vocab, [*before, prompt.ids[0]], starts=prompt.starts[prompt.leads :]) for prompt in prompts
        ]
        each = [pair for pair in zip(self.jobs, prompts, strict=True) for _ in range(asked.n)]
        self._wrote = [TokenScores(vocab, job.tail, len(prompt.echo or "")) for job, prompt in each]
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None

    def _receive(self, number: int, event: Event) -> None:
        """Take an event of prompt `number` in the engine's thread."""
        assert self._loop is not None, "start was called"
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._events.put_nowait, (number, event))

    def start(self) -> None:
        """Give the jobs to the engine; `close` must follow. Raises `Refused` if there is no room for them."""
        self._loop = asyncio.get_running_loop()
        self.service.hold(self.client, self.values)
        try:
            self.service.engine.submit(self.jobs)
        except Refused:
            self.close()
            raise

    def close(self) -> None:
        """Stop the engine's work on it, and forget it: it was sent, or nobody waits for it."""
        for job in self.jobs:
            job.cancelled = True
        self.jobs.clear()  # they hold states, and know this answer: a cycle, which Python would collect late
        self.service.held -= Counter({self.client: self.values})  # a client without values is dropped
        self.values = 0

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """The pieces of all choices, as they come. Events that came together are one piece.

        Raises the error that ended it.
        """
        going = len(self.ids)
        for number, prompt in enumerate(self.prompts):
            begun = self._begin(number, prompt)
            for index in self._choices(number):
                yield index, begun
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

    def _choices(self, number: int) -> range:
        return range(number * self.asked.n, (number + 1) * self.asked.n)

    def _begin(self, number: int, prompt: Prompt) -> Delta:
        """The text of a prompt, and its first token."""
        if prompt.echo is None or not prompt.leads:
            return Delta(prompt.echo or "")
        scores = self._read[number]
        scores.offset = len(TokenText(self.service.vocab, []).write(prompt.ids[0]))
        names = [token_name(self.service.vocab, prompt.ids[0])]
        return Delta(prompt.echo, as_json(names, [None], [None], prompt.starts[:1] or [0]))

    def _take(self, number: int, event: Event, found: defaultdict[int, Delta]) -> None:
        """Add an event of prompt `number` to what was found of its choices."""
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Scored):
            scores, ids = self._read[number], self.prompts[number].ids
            start, scores.count = scores.count + 1, scores.count + len(event.log_probs)
            piece = Delta("", scores.add(ids[start : scores.count + 1], event.log_probs.tolist(), event.tops))
            for index in self._choices(number):
                found[index].add(piece)
            return
        index = self._choices(number)[event.index]
        found[index].add(self._piece(index, event))
        if isinstance(event, Ended) and event.past is not None:
            self.service.sessions.add(self.ids[index], event.past, self.owner, self.client)

    def _piece(self, index: int, event: Wrote | Ended) -> Delta:
        if isinstance(event, Ended):
            shown = self.asked.echo or self.asked.max_tokens  # otherwise it is a part of a character of the prompt
            return Delta(event.text if shown else "", {}, event.reason)
        self.written += 1
        if self.asked.logprobs is None:
            return Delta(event.text)
        return Delta(event.text, self._wrote[index].add([event.token], [event.log_prob], [event.top]))

    async def whole(self) -> bytes:
        """The response in one piece."""
        wholes = [Delta() for _ in self.ids]
        async for index, delta in self.deltas():
            wholes[index].add(delta)
        return self._to_json(enumerate(wholes), usage=True)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The response in pieces."""
        async for index, delta in self.deltas():
            if delta.text or delta.finish_reason or delta.scores:
                yield self._to_json([(index, delta)])
        if (self.asked.stream_options or {}).get("include_usage"):
            yield self._to_json([], usage=True)

    def _to_json(self, pieces: Iterable[tuple[int, Delta]], *, usage: bool = False) -> bytes:
        content = {"id": self.ids[0], "object": "text_completion", "created": self.created, "model": self.service.name}
        if usage:
            read, written = self.prompt_tokens, self.written
            counts = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
            content["usage"] = counts
        choices = (
            to_json(
                {"index": i, "id": self.ids[i], "text": delta.text, "finish_reason": delta.finish_reason},
                logprobs=delta.logprobs(self.asked.logprobs),
            )
            for i, delta in pieces
        )
        return to_json(content, choices=b"[" + b",".join(choices) + b"]")
