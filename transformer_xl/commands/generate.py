"""`txl generate`: generate text with a trained model, and print it token by token."""

from __future__ import annotations

import json
import shutil
import sys
import time
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from ..config.problems import OPTION
from ..mistake import Mistake
from .shared import Precision, RunFolder, Size, open_run

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Integer

    from ..data.vocab import Vocab
    from ..run.checkpoint import LoadedModel

MOST_CONTEXT = 512
"""Maximum number of tokens of the test split in a prompt: the paper's context (Appendix E)."""
MOST_ROWS = 1 << 16


@dataclass(frozen=True)
class Generate:
    """Generate text and print it token by token."""

    folder: RunFolder
    prompt: Annotated[tuple[str, ...], arg(metavar="TEXT|-|@FILE ...")] = ()
    """Text to continue; several prompts are continued in one batch. -: standard input. @FILE: the text of a file."""
    from_test: Size = None
    """Continue N tokens of the test split, at most 512."""
    at: Annotated[str, arg(metavar="POSITION|random")] = "0"
    """With --from-test: the position of its first token, or one drawn with --seed."""
    reference: bool = False
    """With --from-test: print the context, then the generated text beside the text that follows there."""
    max_tokens: Annotated[int, arg(metavar="N")] = 500
    top_k: Annotated[int, arg(metavar="N")] = 40
    """Sample only from the N likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the smallest set of likeliest tokens with at least this total probability."""
    temperature: float = 1.0
    """Divide log-probabilities by this. 0: take the likeliest token each time."""
    stop: Annotated[tuple[str, ...], arg(metavar="TEXT ...")] = ()
    """End the text before the first of these strings."""
    seed: Size = None
    """The same seed gives the same text. By default every call uses a new one."""
    n: int = 1
    """Number of continuations of each prompt."""
    mem_len: Size = None
    """Tokens of memory; by default as in evaluation. 0: generate each token from the last tgt_len tokens."""
    device: str = "auto"
    precision: Precision = "auto"
    json: bool = False
    """Print one JSON object per continuation, after all of them are done."""

    def run(self) -> None:
        from ..data.reading import read_text
        from ..data.vocab import utf8
        from ..evaluation.generate import Sampling, stream_text

        trained = open_run(self.folder, self.device, self.precision)
        problems, config = trained.problems, trained.config
        problems.bound(self, "max_tokens", least=1)
        problems.bound(self, "n", least=1, most=MOST_ROWS)
        problems.bound(self, "from_test", least=1, most=MOST_CONTEXT)
        if self.from_test is not None and self.prompt:
            problems.append("--from-test takes the prompt from the test set, so give it or a prompt, not both.")
        if self.from_test is None and (self.reference or self.at != "0"):
            problems.append("--at and --reference are for --from-test. Give it too, or leave them out.")
        if self.at != "random" and not (self.at.isdecimal() and len(self.at) < 18):
            problems.append(f"--at must be a position, from 0, or random, got {self.at!r}.")
        how = partial(Sampling, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        sampling = problems.attempt(partial(how, seed=self.seed, stop=self.stop), OPTION)
        found = trained.lengths(self)
        problems.refuse()
        assert sampling is not None, "what is refused has a problem"
        read = [read_text(p.removeprefix("@")) if p == "-" or p.startswith("@") else p for p in self.prompt]
        loaded = trained.load()
        prompts, following = _prompts(self, read, loaded) or [""], {}
        texts = [(each if isinstance(each, bytes) else utf8(each)).decode(errors="replace") for each in prompts]
        if self.from_test is not None:
            context, after = _test_ids(self, trained.text(loaded.vocab, None, "test", "test").ids, loaded.vocab)
            prompts, texts = [context], [loaded.vocab.decode(context)]
            following = {"reference": loaded.vocab.decode(after)} if self.reference else {}
        if unknown := loaded.vocab.unknown_in(prompts, "the prompt"):
            print(f"{unknown}.", file=sys.stderr)
        prompts = [prompt for prompt in prompts for _ in range(self.n)]
        texts = [text for text in texts for _ in range(self.n)]
        lengths = config.writing_lengths(found[0])
        pieces = stream_text(
            loaded.model, loaded.vocab, prompts, lengths, sampling, self.max_tokens, precision=trained.precision
        )
        streams = len(texts) == 1 and not self.json and not self.reference
        written = _write(texts, pieces, self, streams=streams)
        if streams:
            return
        for number, (shown, text) in enumerate(zip(texts, written, strict=True), start=1):
            if self.json:
                print(json.dumps({"prompt": shown, "text": text} | following))
            elif following:
                _show_beside(shown, text, following["reference"])
            else:
                print(f"--- {number} ---\n{shown}{text}")


def _show_beside(context: str, text: str, reference: str) -> None:
    """Print the context over the whole width, then the generated text and the reference side by side."""
    width = max((shutil.get_terminal_size().columns - 3) // 2, 20)
    columns = [[line for part in each.splitlines() for line in wrap(part, width) or [""]] for each in (text, reference)]
    print("\n".join(["Context:", context, "", f"{'Generated':{width}} | Reference", f"{'-' * width} | {'-' * width}"]))
    print("\n".join(f"{left:{width}} | {right}".rstrip() for left, right in zip_longest(*columns, fillvalue="")))


def _write(prompts: Sequence[str], pieces: Iterator[tuple[int, str]], options: Generate, *, streams: bool) -> list[str]:
    """The text after each prompt. If it `streams`, the single one is printed while it is generated."""
    written = [""] * len(prompts)
    if streams:
        print(prompts[0], end="", flush=True)
    start = time.perf_counter()
    for row, text in pieces:
        written[row] += text
        if streams:
            print(text, end="", flush=True)
    seconds = time.perf_counter() - start
    if streams:
        print(flush=True)
    what, count = "tokens", options.max_tokens * len(prompts)
    if options.stop:  # so a text may have ended earlier
        what, count = "characters", sum(map(len, written))
    print(f"{count:,} {what} in {seconds:.1f} s, {count / seconds:,.0f} {what}/s", file=sys.stderr)
    return written


def _prompts(options: Generate, read: Sequence[str | bytes], loaded: LoadedModel) -> Sequence[str | bytes]:
    """The texts to continue, in the form that the model reads."""
    from ..data.vocab import text_of

    if loaded.vocab.unit == "byte":
        return read
    return [
        text_of(text.removeprefix(BOM_UTF8), f"The prompt {name}") if isinstance(text, bytes) else text
        for name, text in zip(options.prompt, read, strict=True)
    ]


def _test_ids(
    options: Generate, ids: Integer[np.ndarray, " L"], vocab: Vocab
) -> tuple[Integer[np.ndarray, " N"], Integer[np.ndarray, " M"]]:
    """The context that `options` ask for, and as many tokens after it as are generated."""
    import numpy as np

    ids, size = ids[len(vocab.opening_ids) :], options.from_test or 0
    last = len(ids) - size - (options.max_tokens if options.reference else 0)
    if last < 0:
        lower = "--from-test or --max-tokens" if options.reference else "--from-test"
        raise Mistake(f"The test split has {len(ids):,} tokens, which is too few. Lower {lower}.")
    at = np.random.default_rng(options.seed).integers(last + 1) if options.at == "random" else options.at
    start = int(at)
    if start > last:
        raise Mistake(
            f"--at must be at most {last:,}, because the test split has {len(ids):,} tokens, got {start:,}. Lower it."
        )
    print(f"From token {start:,} of the test split, counted from 0.", file=sys.stderr)
    return ids[start : start + size], ids[start + size : start + size + options.max_tokens]
