"""`LanguageModel`: a trained model and its vocabulary; it reads, scores and generates text.

    model = load_model("runs/mine")
    scored = model.score("The first part of a text")
    more = model.score(", and the next part", scored.context)
    print(model.generate(" of it", more.context, max_tokens=100))

What it has read is a value, `Context`, so one text can be continued in several ways.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from jaxtyping import Float, Int
from torch.nn.utils.rnn import pad_sequence

from ..config.settings import LENGTHS, Lengths
from ..data.vocab import text_of
from ..mistake import Mistake
from ..run.checkpoint import LoadedModel
from ..runtime.device import autocast
from .generate import Context, Sampling, TokenText, prompt_ids, read_prompts, stream_text, with_before
from .score import Reader, bits, device_of, perplexity, ratio
from .sliding import Sliding

Text = str | bytes
Texts = list[str] | list[bytes]
Likely = list[tuple[str, float]]
"""Tokens as text with their probabilities."""
_TOGETHER = 64
"""Number of texts of a list that are read side by side."""


class ScoredTokens(NamedTuple):
    """The cost of a text, token by token."""

    tokens: list[str]
    """Each token as text. A character of several tokens belongs to the last of them."""
    nats: Float[np.ndarray, " n"]
    """The surprise of each token: -log of its probability after everything before it."""
    bytes: int | None
    """UTF-8 bytes of the tokens; None for ids."""
    context: Context
    """The text with everything before it, to be continued."""

    def __repr__(self) -> str:
        count = len(self.tokens)
        return f"ScoredTokens({count:,} tokens, ppl {self.ppl:.2f}, {self.bits_per_byte:.4f} bits per byte)"

    @property
    def ppl(self) -> float:
        """Perplexity per token; nan without tokens."""
        return perplexity(ratio(float(self.nats.sum()), len(self.nats)))

    @property
    def bits_per_byte(self) -> float:
        """Bits per UTF-8 byte; nan without tokens, and for ids."""
        return ratio(bits(float(self.nats.sum())), self.bytes or 0)


class LanguageModel(LoadedModel):
    """A trained `model` in eval mode, with the `vocab` and the `config` of its run. `load_model` returns one.

    A text is read at the lengths of `config.eval_lengths`; `with_lengths` changes them. A model without memory
    (`mem_len` 0) reads the last `tgt_len` tokens again for each token. Arithmetic is fp32. The text of ids is their
    decimal numbers between spaces.
    """

    def with_lengths(self, **lengths: int | None) -> LanguageModel:
        """The same model with other lengths: `tgt_len`, `mem_len`, `clamp_len` or `attn_len`, of which None switches
        the last two off. An `attn_len` of training that does not fit a shorter memory is off too.

        Raises:
            Mistake: these lengths are impossible.
        """
        if unknown := lengths.keys() - {*LENGTHS}:
            raise Mistake(f"with_lengths takes tgt_len, mem_len, clamp_len and attn_len, got {', '.join(unknown)}.")
        trained, mem_len = self.config.train.attn_len, lengths.get("mem_len")
        if trained is not None and mem_len is not None and self.config.eval.attn_len is None and trained > mem_len + 1:
            lengths = {"attn_len": None} | lengths
        if mem_len:  # it replaces the context that segments read again
            lengths = {"context_len": 0} | lengths
        off = {name: None for name in ("clamp_len", "attn_len") if lengths.get(name, 0) is None}
        train, scored = replace(self.config.train, **off), replace(self.config.eval, **lengths)
        return self._replace(config=replace(self.config, train=train, eval=scored))

    @overload
    def score(self, text: Text, context: Context | None = None) -> ScoredTokens: ...

    @overload
    def score(self, text: Texts, context: None = None) -> list[ScoredTokens]: ...

    def score(self, text: Text | Texts, context: Context | None = None) -> ScoredTokens | list[ScoredTokens]:
        """The surprise of each token of `text`, which continues `context` or starts a text; or of each text of a list,
        of which those of at most `tgt_len` tokens are read side by side.

        A text that starts here comes after a line end, as in `txl score`. If the vocabulary has no line end, the first
        token is only context and has no cost. Each result keeps the state of its context: of thousands of texts, score
        a few hundred at a time, and keep only `nats`.

        Raises:
            Mistake: a part of `text` has no token, or a list has a context.
        """
        ends = np.array([] if self.vocab.line_end is None else [self.vocab.line_end], np.int64)
        _check_context(context, text)
        before = ends if context is None else context.tail[-1:]
        texts = [text_of(x, "text") if isinstance(x, bytes) and self.vocab.is_text else x for x in _listed(text)]
        rows = [np.concatenate([before, self.vocab.encode(each)]).astype(np.int64) for each in texts]
        lengths = self._lengths(context)
        shared = [n for n, ids in enumerate(rows) if 1 < len(ids) <= lengths.tgt_len + 1 and self.model.takes_padding]
        groups = _by_length(rows, shared) if context is None and lengths.mem_len else []
        groups += [[n] for n in {*range(len(rows))}.difference(*groups)]
        found: dict[int, ScoredTokens] = {}
        for group in groups:
            found |= zip(group, self._scored([rows[n] for n in group], lengths, context), strict=True)
        return [found[n] for n in range(len(rows))] if isinstance(text, list) else found[0]

    def _scored(
        self, rows: list[Int[np.ndarray, " _"]], lengths: Lengths, context: Context | None
    ) -> list[ScoredTokens]:
        """The costs of rows that are read together, padded on the left. Only a single row may be longer than a segment
        or have a context."""
        reader, device = self._reader(lengths), device_of(self.model)
        counts = torch.tensor([len(ids) for ids in rows], device=device)
        whole = pad_sequence(list(map(torch.from_numpy, rows)), batch_first=True, padding_side="left").to(device)
        with torch.no_grad(), autocast("fp32", device):
            valid = counts - whole.shape[1] if len(rows) > 1 else None
            state = context.copy() if context else reader.empty_cache(len(rows), lengths, valid=valid)
            nats = [np.zeros((len(rows), 0))]
            for start in range(0, whole.shape[1] - 1, lengths.tgt_len):
                window = whole[:, start : start + lengths.tgt_len + 1]
                nll, state = reader(window[:, :-1], window[:, 1:], state, lengths)
                nats.append(nll.double().cpu().numpy())
        costs, found = np.concatenate(nats, 1), []
        sizes = self.vocab.token_sizes(self.config.model.document_end)
        for row, ids in enumerate(rows):
            tokens = [*map(TokenText(self.vocab, with_before(ids[:1], context)).write, ids[1:].tolist())]
            size = None if sizes is None else int(sizes[ids[1:]].sum())
            past, tail = state.select(slice(row, row + 1)), with_before(ids, context)[-3:].tolist()
            read = Context(past, tuple(tail), lengths, self.vocab.fingerprint)
            found.append(ScoredTokens(tokens, costs[row, costs.shape[1] - len(tokens) :], size, read))
        return found

    @overload
    def next_tokens(self, prompt: Text = "", context: Context | None = None, *, count: int = 10) -> Likely: ...

    @overload
    def next_tokens(self, prompt: Texts, context: None = None, *, count: int = 10) -> list[Likely]: ...

    def next_tokens(
        self, prompt: Text | Texts = "", context: Context | None = None, *, count: int = 10
    ) -> Likely | list[Likely]:
        """The `count` likeliest tokens after `prompt` with their probabilities, the likeliest first; of a list, those
        after each prompt.

        Raises:
            Mistake: `count` is below 1, a part of `prompt` has no token, or a list has a context.
        """
        if count < 1:
            raise Mistake(f"count must be at least 1, got {count}.")
        _check_context(context, prompt)
        lengths = self._lengths(context)
        rows = [prompt_ids(self.vocab, each, context) for each in _listed(prompt)]
        reader, found = self._reader(lengths), {}
        for group in _by_length(rows, range(len(rows))):
            state = None if context is None else context.copy()
            log_probs, _ = read_prompts(reader, [rows[n] for n in group], lengths, state=state)
            best = log_probs.exp().topk(min(count, len(self.vocab)))
            for n, ids_of_row, probs in zip(group, best.indices.tolist(), best.values.tolist(), strict=True):
                texts = [TokenText(self.vocab, with_before(rows[n], context)).write(token) for token in ids_of_row]
                found[n] = list(zip(texts, probs, strict=True))
        return [found[n] for n in range(len(rows))] if isinstance(prompt, list) else found[0]

    @overload
    def generate(self, prompt: Text = "", context: Context | None = None, **options: Any) -> str: ...

    @overload
    def generate(self, prompt: Texts, context: None = None, **options: Any) -> list[str]: ...

    def generate(self, prompt: Text | Texts = "", context: Context | None = None, **options: Any) -> str | list[str]:
        """The text that the model writes after `prompt`, without it; see `stream`. Of a list, those of all prompts,
        which are written side by side: row b draws with `seed` + b."""
        _check_context(context, prompt)
        texts = [""] * len(_listed(prompt))
        for row, text in self._stream(_listed(prompt), context, **options):
            texts[row] += text
        return texts if isinstance(prompt, list) else texts[0]

    def stream(
        self, prompt: Text = "", context: Context | None = None, *, max_tokens: int = 500, **sampling: Any
    ) -> Iterator[str]:
        """Yield the text after `prompt`, which continues `context` or starts a text, while the model writes it.

        Args:
            sampling: the fields of `Sampling`: `temperature`, `top_k`, `top_p`, `seed`, `stop`, `forbid`, `bias`,
                `allow`. `forbid` may hold tokens as text, for instance ("<unk>",).

        Raises:
            Mistake: an impossible value, or a part of `prompt` that has no token.
        """
        for _, text in self._stream([prompt], context, max_tokens=max_tokens, **sampling):
            yield text

    def _stream(
        self, prompts: list[Any], context: Context | None, *, max_tokens: int = 500, **sampling: Any
    ) -> Iterator[tuple[int, str]]:
        if max_tokens < 0:
            raise Mistake(f"max_tokens must be at least 0, got {max_tokens}.")
        forbid = [self._id_of(each) for each in sampling.pop("forbid", ())]
        lengths, drawn = self._lengths(context), Sampling(**sampling, forbid=tuple(forbid))
        return stream_text(self.model, self.vocab, prompts, lengths, drawn, max_tokens, context=context)

    def _id_of(self, token: str | int) -> int:
        found = self.vocab.id_of(token) if isinstance(token, str) else token
        if found is None:
            raise Mistake(f"forbid must name tokens of the vocabulary ({self.vocab}), got {token!r}.")
        return found

    def _lengths(self, context: Context | None) -> Lengths:
        if context is None:
            return self.config.writing_lengths(self.config.eval_lengths)
        if context.vocab != self.vocab.fingerprint:
            raise Mistake("context must be of a model with this vocabulary, and is not. Read the text again.")
        return context.lengths

    def _reader(self, lengths: Lengths) -> Reader:
        """A copy of the model for inference."""
        copy = self.model.for_inference()
        return copy if lengths.mem_len else Sliding(copy, lengths.tgt_len)


def _listed(texts: Any) -> list[Any]:
    """One text, or several, as a list."""
    return texts if isinstance(texts, list) else [texts]


def _by_length(rows: list[Any], chosen: Iterable[int]) -> list[list[int]]:
    """The numbers of the chosen rows, in groups of similar length that are read together."""
    order = sorted(chosen, key=lambda n: len(rows[n]))
    return [order[start : start + _TOGETHER] for start in range(0, len(order), _TOGETHER)]


def _check_context(context: object, text: object) -> None:
    """Raise a `Mistake` unless `context` is None, or that of a single text."""
    if context is not None and (isinstance(text, list) or not isinstance(context, Context)):
        given = "a list of texts" if isinstance(text, list) else type(context).__name__
        raise Mistake(f"context must be the context of one scored text, which it continues, got {given}. Leave it out.")
