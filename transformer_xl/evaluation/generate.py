"""Generates text one token at a time, from a prompt of any length, in constant memory.

The paper's samples (Appendix E) come from top-k sampling with k = 40 after up to 512 tokens of context.
"""

from __future__ import annotations

import codecs
import math
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from ..config.problems import Checked, Problem, out_of_bounds
from ..config.settings import Lengths
from ..data.vocab import Vocab
from ..mistake import Mistake, shortened
from ..model.attention import Positions
from ..model.inference import KVCache
from ..model.step import Step, step_state
from ..runtime.device import autocast
from ..runtime.terminal import report_progress
from .score import Reader, State, device_of
from .sliding import Sliding, Window

Prompt = str | bytes | Integer[np.ndarray, " n"]
"""A text to continue, or the ids of its tokens."""
_SCORES = 1 << 18
"""How many scores `sample` reads at a time. With large vocabularies, memory for all rows at once would take most of the
time: a system gives large blocks anew each time."""
_LIKELY = 1 << 13
"""Without top-k, how many likely tokens top-p looks at before it sorts them all."""


class Context(NamedTuple):
    """A text that a model has read. It does not change when text is scored or generated after it.

    Only the weights that read it continue it: another model with this vocabulary may not be refused, and its numbers
    are wrong. `torch.save` writes it, and `torch.load` reads it without executing code.
    """

    state: State
    """What the model remembers of all tokens but the last."""
    tail: tuple[int, ...]
    """The last tokens, at most three, in which a character may begin. The model reads the very last one with the next
    text."""
    lengths: Lengths
    """Those at which the text began. All that continues it is read at them."""
    vocab: str
    """The fingerprint of its vocabulary."""

    def copy(self) -> State:
        """A copy of the state, because a call may change the state that it gets."""
        return self.state.select(slice(None))


# `torch.load` reads a saved context, which holds objects of these classes.
torch.serialization.add_safe_globals([Context, KVCache, Lengths, Positions, Window])


@dataclass(frozen=True, kw_only=True)
class Sampling(Checked):
    """How the next token is drawn: bias, temperature, then top-k, then top-p (`next_token_probs`)."""

    temperature: float = 1.0
    """Divides the log-probabilities; 0 takes the likeliest token, for any seed."""
    top_k: int = 40
    """Draw from this many likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens that hold this share of the probability; 1: from all."""
    seed: int | None = None
    """Row b draws from a random generator of its own with seed + b. None: a different text each time."""
    stop: tuple[str, ...] = ()
    """A row's text ends before the first of these strings."""
    forbid: tuple[int, ...] = ()
    """Ids that are never drawn."""
    bias: tuple[tuple[int, float], ...] = ()
    """Pairs of an id and what is added to its log-probability."""
    allow: Callable[[list[int]], Collection[int]] | None = None
    """Called with the ids that a row has drawn; returns those of which one may follow, for instance by a grammar."""

    def _problems(self) -> Iterator[Problem]:
        yield from out_of_bounds(self, "temperature", "top_k", least=0)
        yield from out_of_bounds(self, "top_p", above=0, most=1)
        if isinstance(self.stop, str):
            yield Problem(("stop",), f"{{}} must be a tuple of texts, got {self.stop!r}.")
        elif not all(self.stop):
            yield Problem(("stop",), f"{{}} must be texts that are not empty, got {', '.join(map(repr, self.stop))}.")
        given = shortened(repr(self.bias))
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in self.bias):
            yield Problem(("bias",), f"{{}} must be a tuple of pairs, each an id and a number, got {given}.")
            return
        if not all(type(i) is int and i >= 0 for i in (*self.forbid, *(i for i, _ in self.bias))):
            named = shortened(repr((self.forbid, self.bias)))
            yield Problem(("forbid", "bias"), f"{{}} and {{}} must name ids, got {named}.")
        if not all(math.isfinite(number) for _, number in self.bias):
            sentence = f"{{}} must be finite numbers, got {given}. Use forbid for what is never drawn."
            yield Problem(("bias",), sentence)

    def generators(self, rows: int) -> list[torch.Generator]:
        """One random generator per row, because a row's text must not depend on other rows."""
        first = secrets.randbits(62) if self.seed is None else self.seed
        return [torch.Generator().manual_seed((first + row) % 2**63) for row in range(rows)]


def next_token_probs(log_probs: Float[Tensor, "B V"], sampling: Sampling) -> Float[Tensor, "B V"]:
    """The probabilities to draw from, float64, rows summing to one: bias, temperature, then top-k, then top-p.

    Among equal scores the lower id is kept, so exactly `top_k` tokens remain. Temperature 0 leaves one token.
    """
    scores = log_probs.double()
    if named := (*sampling.forbid, *dict(sampling.bias)):
        if max(named) >= scores.shape[1]:
            raise Mistake(f"forbid and bias must name ids from 0 to {scores.shape[1] - 1:,}, got {max(named)}.")
        scores = scores.clone()
        if sampling.bias:  # at once: a server may have hundreds in each row
            ids, numbers = zip(*sampling.bias, strict=True)
            added = torch.tensor(numbers, dtype=scores.dtype, device=scores.device).expand(len(scores), -1)
            scores.index_add_(1, torch.tensor(ids, device=scores.device), added)
        scores[:, list(sampling.forbid)] = -torch.inf
    if (named or sampling.allow) and scores.isneginf().all(1).any():
        raise Mistake("forbid and allow must leave a token that may follow, and leave none.")
    if sampling.temperature == 0:
        return torch.zeros_like(scores).scatter_(1, scores.argmax(dim=1, keepdim=True), 1.0)
    scores = (scores - scores.amax(dim=1, keepdim=True)) / sampling.temperature  # no overflow, because the largest is 0
    if 0 < sampling.top_k < scores.shape[1]:
        least = scores.topk(sampling.top_k, dim=1).values[:, -1:]
        room = sampling.top_k - (scores > least).sum(dim=1, keepdim=True)
        equal = scores == least
        scores = scores.masked_fill((scores < least) | (equal & (equal.cumsum(dim=1) > room)), -torch.inf)
    probs = scores.softmax(dim=1)
    if sampling.top_p < 1:
        return _nucleus(probs, sampling.top_p, (sampling.top_k or _LIKELY) + 1)
    return probs


def _nucleus(probs: Float[Tensor, "B V"], top_p: float, count: int) -> Float[Tensor, "B V"]:
    """The fewest likeliest tokens of each row with a share of at least `top_p`, found among the `count` likeliest if
    these suffice: that sorts a large vocabulary up to ten times as fast."""
    few = 4 * count < probs.shape[1]
    if few:
        ids = probs.topk(count, dim=1).indices.sort(dim=1).values
        ordered, order = probs.gather(1, ids).sort(dim=1, descending=True, stable=True)
        ids = ids.gather(1, order)
    else:
        ordered, ids = probs.sort(dim=1, descending=True, stable=True)
    out = pad(ordered.cumsum(dim=1)[:, :-1], (1, 0)) >= top_p
    if few and not (out | (ordered > ordered[:, -1:])).all():  # others may be as likely as the last
        return _nucleus(probs, top_p, probs.shape[1])
    ordered = ordered.masked_fill(out, 0.0)
    total = ordered.cumsum(dim=1)[:, -1:]  # `sum` rounds differently with another number of rows
    return torch.zeros_like(probs).scatter_(1, ids, ordered / total)


def sample(
    log_probs: Float[Tensor, "B V"], sampling: Sampling, generators: Sequence[torch.Generator]
) -> Int[Tensor, " B"]:
    """Draw one id per row, on the CPU, because a seed must give the same text on every device.

    One uniform number per row goes through the inverse of the cumulative distribution. Raises `FloatingPointError` for
    log-probabilities that are nan.
    """
    if log_probs.isnan().any():
        raise FloatingPointError("The model's probabilities are not numbers (nan), so nothing can be drawn from them.")
    scores, rows, drawn = log_probs.cpu(), max(_SCORES // log_probs.shape[1], 1), []
    for start in range(0, len(scores), rows):
        part = slice(start, start + rows)
        cumulative = next_token_probs(scores[part], sampling).cumsum(dim=1)
        uniform = torch.stack([torch.rand(1, generator=g, dtype=torch.float64, device="cpu") for g in generators[part]])
        drawn.append(torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True))
    return torch.cat(drawn).squeeze(1)


def stream(
    model: Reader,
    prompts: Sequence[Integer[np.ndarray, " _"]],
    lengths: Lengths,
    sampling: Sampling,
    max_tokens: int,
    *,
    state: State | None = None,
    ended: Callable[[int], bool] | None = None,
    precision: str = "fp32",
) -> Iterator[list[tuple[int, int]]]:
    """At each step yield the new `(row, id)` of every row that has not ended. Only `stream_text` obeys `sampling.stop`.

    `state` is what the model remembers before the prompts; None: nothing. Without a memory (`mem_len` 0) the last
    `tgt_len` tokens are read again for each new one. Prompts hold at least one id and may differ in length. A row
    leaves the batch before the next step if `ended(row)`. A row's tokens do not depend on the other rows, except for
    rounding.
    """
    assert all(len(prompt) for prompt in prompts), "a prompt must hold at least one id"
    if not prompts:
        return
    device = device_of(model)
    if not lengths.mem_len:
        model = Sliding(model, lengths.tgt_len)
    model = model.for_inference(precision)
    past: State | Step | None = None
    drawn: list[list[int]] = [[] for _ in prompts]
    rows, generators = list(range(len(prompts))), sampling.generators(len(prompts))
    if (state is None or isinstance(state, KVCache)) and model.takes_padding:  # otherwise zeros before the row count
        most = (0 if state is None else state.length) + max(map(len, prompts)) + max(max_tokens, 0)
        attn_len = None if (lengths.attn_len or 0) >= most else lengths.attn_len  # a limit that no token reaches
        lengths = replace(lengths, mem_len=min(lengths.mem_len, most), attn_len=attn_len)  # a step allocates them whole
    for _ in range(max_tokens):
        if past is None:
            log_probs, past = read_prompts(model, prompts, lengths, precision, state)
        else:
            last = torch.tensor([drawn[row][-1:] for row in rows], device=device)
            log_probs, past = _read_tokens(model, last, past, lengths, precision)
        if sampling.allow is not None:
            log_probs = _only(log_probs, [list(sampling.allow(drawn[row])) for row in rows])
        ids = sample(log_probs, sampling, [generators[row] for row in rows])
        for row, new in zip(rows, ids.tolist(), strict=True):
            drawn[row].append(new)
        yield list(zip(rows, ids.tolist(), strict=True))
        going = [i for i, row in enumerate(rows) if ended is None or not ended(row)]
        if not going:
            return
        if len(going) < len(rows):
            rows, past = [rows[i] for i in going], past.select(torch.tensor(going, device=device))


def _only(log_probs: Float[Tensor, "B V"], allowed: list[list[int]]) -> Float[Tensor, "B V"]:
    """The log-probabilities of the ids that may follow in each row; -inf for all others."""
    kept = torch.full_like(log_probs, -torch.inf)
    for row, ids in enumerate(allowed):
        if not all(0 <= i < log_probs.shape[1] for i in ids):
            raise Mistake(f"allow must return ids from 0 to {log_probs.shape[1] - 1:,}, got {shortened(repr(ids))}.")
        kept[row, ids] = log_probs[row, ids]
    return kept


def read_prompts(
    model: Reader,
    prompts: Sequence[Integer[np.ndarray, " _"]],
    lengths: Lengths,
    precision: str = "fp32",
    state: State | None = None,
) -> tuple[Float[Tensor, "B V"], State]:
    """Read prompts in segments of `tgt_len`; return the log-probabilities of what follows, and the state.

    The first segment may be shorter, because a prompt must be cut into the same segments whether or not the batch has
    longer ones. `state` is what the model remembers before the prompts, which then have one length; None: nothing.
    """
    device, uneven = device_of(model), len(set(map(len, prompts))) > 1
    if uneven and not model.takes_padding:
        read = [read_prompts(model, [prompt], lengths, precision) for prompt in prompts]
        states: list[Any] = [state for _, state in read]  # of models that take no padding, which all have `cat`
        return torch.cat([log_probs for log_probs, _ in read]), states[0].cat(states)
    tensors = [torch.from_numpy(np.asarray(prompt, dtype=np.int64)) for prompt in prompts]
    ids = pad_sequence(tensors, batch_first=True, padding_side="left").to(device)
    log_probs, total = None, ids.shape[1]
    if state is None:
        valid = torch.tensor([len(prompt) - total for prompt in prompts], device=device) if uneven else None
        with torch.no_grad(), autocast(precision, device):
            state = model.empty_cache(len(ids), lengths, valid=valid)
    ends = range((total - 1) % lengths.tgt_len + 1, total + 1, lengths.tgt_len)
    for end in report_progress(ends, "reading the prompt"):
        segment = ids[:, max(end - lengths.tgt_len, 0) : end]
        with torch.no_grad(), autocast(precision, device):
            log_probs, state = model.log_probs(segment, state, lengths, last=1)
    assert log_probs is not None, "there is a prompt, so there is a segment"
    return log_probs[:, -1], state


@torch.no_grad()
def _read_tokens(
    model: Reader, ids: Int[Tensor, "B 1"], past: State | Step, lengths: Lengths, precision: str
) -> tuple[Float[Tensor, "B V"], State | Step]:
    """Log-probabilities after the next token of each row, by a `Step` if one is possible."""
    with autocast(precision, ids.device):
        past = step_state(model, past, lengths)
        if isinstance(past, Step):
            return past(ids), past
        log_probs, past = model.log_probs(ids, past, lengths, last=1)
    return log_probs[:, -1], past


def stream_text(
    model: Reader,
    vocab: Vocab,
    prompts: Sequence[Prompt],
    lengths: Lengths,
    sampling: Sampling,
    max_tokens: int,
    *,
    context: Context | None = None,
    precision: str = "fp32",
) -> Iterator[tuple[int, str]]:
    """Yield `(row, new text)` as the model generates it, without the prompt.

    `context` precedes the prompt and needs exactly one. For the first tokens of a text see `prompt_ids`. Text
    that may be the start of a stop string, or of a character of several bytes, is held back until that is known.
    """
    assert context is None or len(prompts) == 1, "a context is of one row"
    ids = [prompt_ids(vocab, prompt, context) for prompt in prompts]
    writers = [TokenText(vocab, with_before(prompt, context), sampling.stop) for prompt in ids]
    steps = stream(
        model,
        ids,
        lengths,
        sampling,
        max_tokens,
        state=context and context.copy(),
        ended=lambda row: writers[row].ended,
        precision=precision,
    )
    for step in steps:
        for row, new in step:
            if text := writers[row].write(new):
                yield row, text
    for row, writer in enumerate(writers if max_tokens else ()):  # without tokens, what is held is the prompt's
        if text := writer.close():
            yield row, text


def generate(
    model: Reader,
    vocab: Vocab,
    prompts: Sequence[str | bytes],
    lengths: Lengths,
    sampling: Sampling,
    max_tokens: int,
    *,
    precision: str = "fp32",
) -> list[str]:
    """The continuation of each prompt, without the prompt; see `stream_text`."""
    texts = [""] * len(prompts)
    for row, text in stream_text(model, vocab, prompts, lengths, sampling, max_tokens, precision=precision):
        texts[row] += text
    return texts


def prompt_ids(vocab: Vocab, prompt: Prompt, context: Context | None) -> Integer[np.ndarray, " n"]:
    """The ids of a prompt, at least one. Before it come the last token of `context`, or the tokens that open a text.

    An empty prompt at the start is a line end, or id 0 if the vocabulary has no line end.
    """
    own = prompt if isinstance(prompt, np.ndarray) else vocab.encode(prompt)
    ids = np.concatenate([vocab.opening_ids if context is None else np.array(context.tail[-1:], np.int64), own])
    return ids if len(ids) else np.array([vocab.line_end or 0])


def with_before(ids: Integer[np.ndarray, " n"], context: Context | None) -> Integer[np.ndarray, " m"]:
    """Ids that begin with the last token of `context`, after the tokens in which its last character may begin."""
    return ids if context is None else np.concatenate([np.array(context.tail[:-1], np.int64), ids])


class TokenText:
    """Turns one row's ids into text that can be shown: whole characters, and no part of a stop string."""

    def __init__(
        self, vocab: Vocab, before: Sequence[int] | Integer[np.ndarray, " n"], stop: Sequence[str] = ()
    ) -> None:
        """Begin after the ids `before`, of which the last three are enough."""
        self.ended: bool = False
        self._vocab, self._stop = vocab, stop
        self._last = before[-1:]
        self._held = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        if not vocab.is_text:
            self._decoder.decode(vocab.decode_bytes(before[-3:]))  # they may end inside a character

    def write(self, new: int) -> str:
        """Add an id; return the text that later ids cannot change."""
        self._held += self._text(new)
        found = [(start + len(stop), start) for stop in self._stop if (start := self._held.find(stop)) >= 0]
        if found:
            self.ended = True
            _, start = min(found)  # the stop string that ends first, however the text is cut into tokens
            text, self._held = self._held[:start], ""
            self._decoder.reset()  # what follows the stop string may be a part of a character
            return text
        lengths = range(len(self._held), 0, -1)
        doubtful = (n for n in lengths if any(stop.startswith(self._held[-n:]) for stop in self._stop))
        shown = len(self._held) - next(doubtful, 0)
        text, self._held = self._held[:shown], self._held[shown:]
        return text

    def close(self) -> str:
        """The rest of the text, after the last id."""
        text, self._held = self._held, ""
        return text + self._decoder.decode(b"", final=True)

    def _text(self, new: int) -> str:
        if not self._vocab.is_text:
            return self._decoder.decode(self._vocab.token_bytes[new])
        before, self._last = self._last, [new]
        return self._vocab.decode([*before, new])[len(self._vocab.decode(before)) :]
