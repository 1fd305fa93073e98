"""lm-evaluation-harness (lm_eval): a trained model as one of its models, in this process.

Every text is read after a line end: its own if it begins with one, otherwise one is put before it. A vocabulary without
line ends puts its most frequent token there. The memory is empty at the start of each text and then continues to its
end, so a document of any length is read once and each of its tokens is scored once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from jaxtyping import Integer

from ..config.settings import Lengths
from ..data.vocab import Vocab
from ..evaluation.sequences import Continuation, score_continuations, score_sequences
from ..mistake import Mistake
from ..run import LoadedModel

Ids = Integer[np.ndarray, " _"]


class TextModel:
    """Scores texts as the harness asks for them, in plain values.

    Raises:
        Mistake: a text has a word or character that the model does not know.
    """

    def __init__(self, loaded: LoadedModel, lengths: Lengths | None = None, *, precision: str = "fp32"):
        """By default the lengths of the run's evaluation."""
        self.loaded: LoadedModel = loaded
        self.vocab: Vocab = loaded.vocab
        self.lengths: Lengths = lengths or loaded.config.eval_lengths
        self.precision: str = precision

    @property
    def opening_id(self) -> int:
        """The token after which a text is read."""
        return self.vocab.line_end or 0

    def encode(self, text: str) -> Ids:
        """The ids of a text without the opening token. A text may spell `<unk>` itself."""
        ids, unk = self.vocab.encode(text), self.vocab.unk
        if unk is not None:
            unknown = int((ids == unk).sum()) - text.split().count(str(self.vocab.symbols[unk]))
            if unknown > 0:
                raise Mistake(
                    f"The texts of a task must have only {self.vocab.unit}s that the model knows, and {unknown:,} of "
                    f"{len(ids):,} in one text are others. Use a model of bytes or byte pairs."
                )
        return ids

    def open(self, ids: Ids) -> Ids:
        """The ids with the opening token, which is not repeated."""
        own = len(ids) and ids[0] == self.vocab.line_end
        return ids if own else np.concatenate([np.array([self.opening_id]), ids]).astype(np.int64)

    def log_probs(self, texts: Sequence[str]) -> list[float]:
        """The log-probability of each text in nats: each token once, in one pass with memory."""
        sequences = [self.open(self.encode(text)) for text in texts]
        model = self.loaded.model
        nats = score_sequences(model, sequences, self.lengths, precision=self.precision, title="scoring documents")
        return [-each for each in nats]

    def continuations(self, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[Continuation]:
        """The score of the second ids of each pair after the first ones."""
        arrays = [(self.open(np.array(first, np.int64)), np.array(rest, np.int64)) for first, rest in pairs]
        model = self.loaded.model
        return score_continuations(model, arrays, self.lengths, precision=self.precision, title="scoring answers")


def harness_model(loaded: LoadedModel, lengths: Lengths | None = None, *, precision: str = "fp32") -> object:
    """A trained model for `lm_eval.simple_evaluate(model=...)`; see `TextModel` for the arguments.

    Raises:
        Mistake: lm_eval is not installed.
    """
    require_harness()
    base: Any = import_module("lm_eval.api.model").TemplateLM
    text_model = TextModel(loaded, lengths, precision=precision)

    class TransformerXLHarness(base):
        """Translates requests of the harness. `loglikelihood` is its own: it calls `_loglikelihood_tokens`."""

        @property
        def eot_token_id(self) -> int:
            return text_model.opening_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
            return text_model.encode(string).tolist()

        def _loglikelihood_tokens(self, requests: Sequence[Any], **_: object) -> list[tuple[float, bool]]:
            scores = text_model.continuations((first, rest) for _, first, rest in requests)
            return [(score.log_prob, score.greedy) for score in scores]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            return text_model.log_probs([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[object], disable_tqdm: bool = False) -> list[str]:
            raise Mistake("Written answers need a server: `txl serve`, and `lm_eval --model local-completions`.")

    return TransformerXLHarness()


def require_harness() -> None:
    """Refuse to go on without lm_eval. A folder of that name is not the package."""
    found = find_spec("lm_eval")
    if found is None or found.origin is None:
        raise Mistake("lm-evaluation-harness must be installed for this: run `pip install lm-eval`.")
