"""Continuous batching: a thread that reads prompts and writes texts, with a step of constant shape.

A text is written in a row of one `Step`. Rows come and go while others go on. Between two steps the engine reads at
most one segment of one prompt, and reading takes at most half of the time. A prompt is read alone and cut from its
start into segments of `tgt_len`, as `txl score` does. So a text does not depend on other texts: with the step in C++
and a vocabulary without bands (`model.cutoffs`) to the last bit, otherwise to rounding.

Clients take turns in reading, and share the rows: while a client waits for a row, another one that has two more gives
one up. The text that was in it goes on later, from the same keys and values.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ..config.settings import Lengths, TransformerXLConfig
from ..data.vocab import Vocab
from ..evaluation.generate import TokenText, sample
from ..evaluation.score import device_of
from ..model.adaptive import MOST_SCORES
from ..model.inference import KVCache
from ..model.kernels import can_step, includes_head
from ..model.step import Step
from ..model.transformer_xl import TransformerXL
from ..ops.masks import next_multiple
from ..runtime.device import autocast, synchronize
from .jobs import Ended, Job, Scored, Top, Turns, Wrote, has_room
from .requests import Refused
from .sessions import Past, reach_of

LOG = logging.getLogger("transformer_xl.serving")
ROWS = 8
"""A step has a multiple of this number of rows: otherwise PyTorch's numbers depend on where in a product a row is."""
_BEGINNINGS = 4
"""Number of memory lengths whose encoded distances are kept."""


@dataclass(eq=False)
class Writing:
    """A continuation: in a row, or with the past that it takes into one."""

    job: Job
    index: int
    cache: KVCache | None
    writer: TokenText
    generator: torch.Generator
    tail: list[int]
    """The last tokens of the text, as in `Past`."""
    written: int = 0
    slot: int | None = None
    """Its slot in the row that it gave up."""


class Engine:
    """Texts in, events out. `submit` and `stop` may be called from any thread."""

    def __init__(
        self,
        model: TransformerXL,
        vocab: Vocab,
        lengths: Lengths,
        *,
        rows: int = 16,
        most: int = 256,
        precision: str = "fp32",
    ) -> None:
        """Begin without a thread; `start` makes one.

        Args:
            rows: number of texts that are written at the same time, rounded up to a multiple of `ROWS`.
            most: number of prompts that may wait; of one client as many as there is room left.
        """
        rows = -(-rows // ROWS) * ROWS
        self.vocab: Vocab = vocab
        self.lengths: Lengths = lengths
        self.rows: int = rows
        self.most: int = most
        self.precision: str = precision
        self.device: torch.device = device_of(model)
        self.model: TransformerXL = model.for_inference(precision)
        self.counts: dict[str, float] = {"tokens_read": 0, "tokens_written": 0, "steps": 0, "step_seconds": 0.0}
        self._wake = threading.Condition()
        self._queue: Turns[Job] = Turns(lambda job: job.client)
        self._reading: Turns[Job] = Turns(lambda job: job.client)
        self._ready: Turns[Writing] = Turns(lambda holder: holder.job.client)
        self._writing: list[Writing | None] = [None] * rows
        self._lead = 0.0
        self._empty_cache = lru_cache(_BEGINNINGS)(partial(empty_cache, self.model))
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="txl-engine", daemon=True)
        with torch.no_grad(), autocast(precision, self.device):
            cache = self.model.empty_cache(rows, lengths)
            self._native: bool = can_step(self.model.backbone, cache.buffers[0])
            self._step: Step = Step(self.model, cache, lengths)
        if self._native and not includes_head(self.model.backbone, self.model.softmax):
            self._step.head = None

    def start(self) -> Engine:
        self._thread.start()
        return self

    def submit(self, jobs: Sequence[Job]) -> None:
        """Put jobs of one client into the queue, all or none.

        Raises:
            Refused: there is no room for all of them.
        """
        with self._wake:
            if not has_room(self.most, len(self._queue), self._queue.of(jobs[0].client), len(jobs)):
                raise Refused(429, "The queue is full. Try again later.", code="queue_full")
            self._queue.extend(jobs)
            self._wake.notify()

    def stop(self) -> None:
        """Drop all jobs and end the thread."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def waiting(self) -> int:
        """Prompts that nothing has been read of."""
        return len(self._queue)

    @property
    def busy(self) -> int:
        """Prompts being read, and texts being written."""
        return len(self._reading) + len(self._ready) + sum(row is not None for row in self._writing)

    # The engine's own thread.

    def _run(self) -> None:
        with torch.no_grad(), autocast(self.precision, self.device):
            while self._wait():
                try:
                    self._admit()
                    self._read()
                    self._seat()
                    self._write()
                except Exception:
                    LOG.exception("The engine failed; its texts are dropped.")
                    self._fail(Refused(500, "The server made a mistake. Its log says which one."))
        self._fail(Refused(503, "The server is shutting down."))

    def _wait(self) -> bool:
        """Sleep until there is work; return False to end."""
        with self._wake:
            self._wake.wait_for(lambda: self._stopped or self.busy or self.waiting)
            return not self._stopped

    def _admit(self) -> None:
        """Begin to read prompts from the queue: of each client until half of the rows could be filled."""
        begun = Counter([*(job.client for job in self._reading), *(each.job.client for each in self._ready)])
        with self._wake:
            self._queue.keep(lambda job: not job.cancelled)
            while self._queue and begun[self._queue.first(begun.__getitem__).client] < self.rows // 2:
                self._reading.append(self._queue.next(begun.__getitem__))
                begun[self._reading[-1].client] += 1
        self._reading.keep(lambda job: not job.cancelled)
        self._ready.keep(lambda holder: not holder.job.cancelled)

    def _read(self) -> None:
        """Read one segment of the prompt whose turn it is, unless writing has had less time."""
        if not self._reading or self._lead > 0:
            return
        started = time.perf_counter()
        job = self._reading.first()
        state, end = job.state or self._state(job), len(job.ids) - 1
        if job.read < end:
            ids = job.ids[job.read : job.read + job.lengths.tgt_len + 1]
            window = torch.from_numpy(ids.astype("int64")).to(self.device)[None]
            state = self._read_segment(job, window, state)
            job.read += len(ids) - 1
            self.counts["tokens_read"] += len(ids) - 1
        if job.read < end:
            job.state = state
            self._reading.append(self._reading.next())
        else:
            job.state = None
            self._begin(job, state.fork())
            self._reading.next()  # only now: a job that is nowhere would never hear of an error
        synchronize(self.device)
        self._lead = time.perf_counter() - started

    def _state(self, job: Job) -> KVCache:
        """What a job begins with. The distances of all texts are the same, and encoded once."""
        empty = self._empty_cache(job.lengths)
        past = empty if job.past is None else job.past.cache
        return replace(past.fork(), positions=empty.positions, reach=empty.reach)

    def _begin(self, job: Job, cache: KVCache) -> None:
        """Put the continuations of a prompt that was read where they wait for a row."""
        past = Past(cache, job.tail, job.lengths).to_keep() if job.store and not job.max_tokens else None
        for index, generator in enumerate(job.sampling.generators(job.n)):
            writer = TokenText(self.vocab, job.tail, job.sampling.stop)
            if job.max_tokens:
                self._ready.append(Writing(job, index, cache, writer, generator, job.tail))
            else:
                job.emit(Ended(index, writer.close(), "length", past))

    def _read_segment(self, job: Job, window: Int[Tensor, "1 L"], state: KVCache) -> KVCache:
        """The state after a segment. With `echo`, its tokens are scored: as `LanguageModel.score` does."""
        if not job.echo:
            return self.model.hidden(window[:, :-1], state, job.lengths)[1]
        prediction, state = self.model.predict(window[:, :-1], window[:, 1:], state, job.lengths)
        tops = self._tops(prediction.features[0], job.top)
        job.emit(Scored(-prediction.nll[0].double().cpu().numpy(), tops))
        return state

    def _tops(self, features: Float[Tensor, "T D"], count: int) -> list[Top]:
        if not count:
            return [[] for _ in features]
        pieces = features.split(max(MOST_SCORES // len(self.vocab), 1))
        return [top for piece in pieces for top in tops_of(self.model.softmax.log_probs(piece), count)]

    def _seat(self) -> None:
        """Give rows to texts that wait for one: free ones, or one of the client that has the most."""
        self._writing = [None if each is None or each.job.cancelled else each for each in self._writing]
        held = Counter(each.job.client for each in self._writing if each is not None)
        free = [row for row, each in enumerate(self._writing) if each is None]
        while self._ready:
            if not free:
                rich, poor = max(held, key=held.__getitem__), self._ready.first(held.__getitem__).job.client
                if held[rich] - held[poor] < 2:
                    return
                free.append(self._unseat(rich))
                held[rich] -= 1
            row, holder = free.pop(0), self._ready.next(held.__getitem__)
            assert holder.cache is not None, "its past waits with it"
            self._writing[row] = holder
            self._step.put(row, replace(holder.cache), reach_of(holder.job.lengths), slot=holder.slot)
            holder.cache = None
            held[holder.job.client] += 1

    def _unseat(self, client: str) -> int:
        """Take the text of a client that has written least out of its row, and return the row."""
        texts = {row: each for row, each in enumerate(self._writing) if each is not None and each.job.client == client}
        row = min(texts, key=lambda row: texts[row].written)
        holder = texts[row]
        holder.cache, holder.slot = self._step.take(row), int(self._step.slots[row])
        self._writing[row] = None
        self._ready.put_back(holder)
        return row

    def _write(self) -> None:
        """Write one token in each row that has a text."""
        holders = {row: holder for row, holder in enumerate(self._writing) if holder is not None}
        if not holders:
            self._lead = 0.0
            return
        started = time.perf_counter()
        ids = [0 if holder is None else holder.tail[-1] for holder in self._writing]
        number = {row: n for n, row in enumerate(holders)}
        log_probs = self._log_probs(torch.tensor(ids, device=self.device)[:, None], torch.tensor(list(holders))).cpu()
        self.counts["steps"] += 1
        self.counts["step_seconds"] += time.perf_counter() - started
        broken = log_probs.isnan().any(dim=1).tolist()
        groups: defaultdict[tuple[object, ...], dict[int, Writing]] = defaultdict(dict)
        for row, holder in holders.items():
            if broken[number[row]]:
                holder.job.emit(Refused(500, "The model's probabilities are not numbers (nan)."))
                self._writing[row] = None
            else:
                how, top = holder.job.sampling, holder.job.top
                # Those with the same settings draw alike, each with its own random numbers.
                groups[how.temperature, how.top_k, how.top_p, how.bias, top][row] = holder
        for group in groups.values():
            self._draw(group, log_probs[[number[row] for row in group]])
        self._lead -= time.perf_counter() - started

    def _log_probs(self, ids: Int[Tensor, "B 1"], rows: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        """Log-probabilities after `ids` in these rows.

        The step in C++ computes only these rows, because its bits do not depend on their number. PyTorch's may, so the
        inputs always have all rows. A softmax that the step leaves to PyTorch has a multiple of `ROWS`, which mostly,
        not always, rounds alike.
        """
        if not self._native:
            return self._step(ids)[rows]
        out = self._step.select(rows).read(self._step.inputs(ids, rows)[rows])
        if self._step.head:
            return out
        return self.model.softmax.log_probs(pad(out, (0, 0, 0, -len(out) % ROWS)))[: len(out)]

    def _draw(self, holders: dict[int, Writing], log_probs: Float[Tensor, "R V"]) -> None:
        """Draw the next token of these rows, which draw alike."""
        job = next(iter(holders.values())).job
        tokens = sample(log_probs, job.sampling, [holder.generator for holder in holders.values()])
        drawn = log_probs.gather(1, tokens[:, None])[:, 0].tolist()
        tops: list[Top] = tops_of(log_probs, job.top) if job.top else [[] for _ in holders]
        for (row, holder), token, log_prob, top in zip(holders.items(), tokens.tolist(), drawn, tops, strict=True):
            self._wrote(row, holder, token, log_prob, top)

    def _wrote(self, row: int, holder: Writing, token: int, log_prob: float, top: Top) -> None:
        text = holder.writer.write(token)
        holder.tail, holder.written = [*holder.tail, token][-3:], holder.written + 1
        self.counts["tokens_written"] += 1
        holder.job.emit(Wrote(holder.index, token, text, log_prob, top))
        if holder.writer.ended or holder.written == holder.job.max_tokens:
            job, reason = holder.job, "stop" if holder.writer.ended else "length"
            past = Past(self._step.take(row), holder.tail, job.lengths).to_keep() if job.store else None
            self._writing[row] = None
            job.emit(Ended(holder.index, holder.writer.close(), reason, past))

    def _fail(self, error: Exception) -> None:
        """Drop all texts."""
        with self._wake:
            jobs = [*self._queue, *self._reading]
            jobs += [each.job for each in (*self._ready, *self._writing) if each is not None]
            self._queue.keep(lambda job: False)
        self._reading.keep(lambda job: False)
        self._ready.keep(lambda holder: False)
        self._writing = [None] * self.rows
        for job in dict.fromkeys(jobs):
            job.emit(error)


def empty_cache(model: TransformerXL, lengths: Lengths) -> KVCache:
    """A cache of nothing, whose forks need not encode distances again."""
    cache: KVCache = model.empty_cache(1, lengths)
    reach = next_multiple(lengths.mem_len + lengths.tgt_len)
    cache.keep_positions(model.backbone.positions(reach, lengths.clamp_len, model.backbone.like), reach)
    return cache


def tops_of(log_probs: Float[Tensor, "B V"], count: int) -> list[Top]:
    """The likeliest tokens of each row."""
    best = log_probs.topk(min(count, log_probs.shape[1]), dim=1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [list(zip(ids, values, strict=True)) for ids, values in pairs]


def refusal(config: TransformerXLConfig, lengths: Lengths) -> str | None:
    """Why this model cannot be served; None if it can."""
    if config.kind != "transformer-xl":
        return f"txl serve needs a model of kind transformer-xl, got {config.kind}."
    if reach_of(lengths) < 1:
        short = ("--mem-len", 1, 0) if not lengths.mem_len else ("eval.attn_len", 2, lengths.attn_len)
        return "{} must be at least {} for txl serve, got {}.".format(*short)
    return None
