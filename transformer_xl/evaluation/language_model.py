"""`LanguageModel`: a trained model and its vocabulary; it reads, scores and generates text.

    model = load_model("runs/mine")
    scored = model.score("The first part of a text")
    more = model.score(", and the next part", scored.context)
    print(model.generate(" of it", more.context, max_tokens=100))

What it has read is a value, `Context`, so one text can be continued in several ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float

from ..config.settings import Lengths
from ..mistake import Mistake
from ..run.checkpoint import LoadedModel
from ..runtime.device import autocast
from .generate import Context, Sampling, TokenText, Writer, prompt_ids, read_prompts, stream_text
from .score import State, bits, device_of, perplexity, ratio
from .sliding import Sliding


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
        """The same model with other lengths: `tgt_len`, `mem_len`, `clamp_len` or `attn_len`.

        Raises:
            Mistake: these lengths are impossible.
        """
        if unknown := lengths.keys() - {"tgt_len", "mem_len", "clamp_len", "attn_len"}:
            raise Mistake(f"with_lengths takes tgt_len, mem_len, clamp_len and attn_len, got {', '.join(unknown)}.")
        return self._replace(config=replace(self.config, eval=replace(self.config.eval, **lengths)))

    def score(self, text: str | bytes, context: Context | None = None) -> ScoredTokens:
        """The surprise of each token of `text`, which continues `context` or starts a text.

        A text that starts here comes after a line end, as in `txl score`. If the vocabulary has no line end, the first
        token is only context and has no cost.

        Raises:
            Mistake: a part of `text` has no token.
        """
        ends = [] if self.vocab.line_end is None else [self.vocab.line_end]
        ids = np.concatenate([ends if context is None else context.last, self.vocab.encode(text)]).astype(np.int64)
        lengths, state = self._begin(context)
        reader, row = self._reader(lengths), torch.from_numpy(ids).to(device_of(self.model))[None]
        nats = [np.zeros(0)]
        for start in range(0, len(ids) - 1, lengths.tgt_len):
            window = row[:, start : start + lengths.tgt_len + 1]
            with torch.no_grad(), autocast("fp32", row.device):
                nll, state = reader(window[:, :-1], window[:, 1:], state, lengths)
            nats.append(nll[0].double().cpu().numpy())
        tokens: list[str] = []
        if len(ids) > 1:
            writer = TokenText(self.vocab, ids[:1])
            tokens = [writer.write(token) for token in ids[1:].tolist()]
        sizes = self.vocab.token_sizes()
        size = None if sizes is None else int(sizes[ids[1:]].sum())
        read = Context(state, ids[-1:], lengths, self.vocab.fingerprint)
        return ScoredTokens(tokens, np.concatenate(nats), size, read)

    def next_tokens(
        self, prompt: str | bytes = "", context: Context | None = None, *, count: int = 10
    ) -> list[tuple[str, float]]:
        """The `count` likeliest tokens after `prompt` with their probabilities, the likeliest first.

        Raises:
            Mistake: `count` is below 1, or a part of `prompt` has no token.
        """
        if count < 1:
            raise Mistake(f"count must be at least 1, got {count}.")
        lengths, state = self._begin(context)
        ids = prompt_ids(self.vocab, prompt, context).astype(np.int64)
        device = device_of(self.model)
        log_probs, _ = read_prompts(
            self._reader(lengths), torch.from_numpy(ids)[None], [len(ids)], lengths, device, state=state
        )
        best = log_probs[0].exp().topk(min(count, len(self.vocab)))
        return [
            (TokenText(self.vocab, ids).write(token), p)
            for token, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def generate(self, prompt: str | bytes = "", context: Context | None = None, **options: Any) -> str:
        """The text that the model writes after `prompt`, without it; see `stream`."""
        return "".join(self.stream(prompt, context, **options))

    def stream(
        self, prompt: str | bytes = "", context: Context | None = None, *, max_tokens: int = 500, **sampling: Any
    ) -> Iterator[str]:
        """Yield the text after `prompt`, which continues `context` or starts a text, while the model writes it.

        Args:
            sampling: the fields of `Sampling`: `temperature`, `top_k`, `top_p`, `seed`, `stop`.

        Raises:
            Mistake: an impossible value, or a part of `prompt` that has no token.
        """
        if max_tokens < 0:
            raise Mistake(f"max_tokens must be at least 0, got {max_tokens}.")
        lengths, drawn = self._lengths(context), Sampling(**sampling)
        for _, text in stream_text(self.model, self.vocab, [prompt], lengths, drawn, max_tokens, context=context):
            yield text

    def _begin(self, context: Context | None) -> tuple[Lengths, State]:
        """The lengths, and a state that a call may change."""
        lengths = self._lengths(context)
        if context is not None:
            return lengths, context.copy()
        with torch.no_grad(), autocast("fp32", device_of(self.model)):
            return lengths, self._reader(lengths).empty_cache(1, lengths)

    def _lengths(self, context: Context | None) -> Lengths:
        if context is None:
            return self.config.writing_lengths(self.config.eval_lengths)
        if context.vocab != self.vocab.fingerprint:
            raise Mistake("context must be of a model with this vocabulary, and is not. Read the text again.")
        return context.lengths

    def _reader(self, lengths: Lengths) -> Writer:
        """A copy of the model for inference."""
        copy = self.model.for_inference()
        return copy if lengths.mem_len else Sliding(copy, lengths.tgt_len)
