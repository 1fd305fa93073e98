"""`txl generate`: text from a trained model, printed while it is generated."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...checkpoint import LoadedModel
from ...config.settings import Lengths
from ...data.corpora.detokenise import Detokeniser, readable
from ...data.datasets import is_tokenised
from ...evaluation.generate import Sampling, stream_text
from ...model.inference import has_compiler
from .texts import CountingVocab, decoded, read_text
from .trained import Trained

MOST_CONTEXT = 512
"""Maximum number of tokens of the test split in a prompt: the paper's context (Appendix E)."""
MOST_ROWS = 1 << 16


def generate(
    run: Path,
    prompts: Sequence[str],
    sampling: Mapping[str, Any],
    max_tokens: int,
    *,
    rows: int = 1,
    from_test: int | None = None,
    mem_len: int | None = None,
    device: str = "auto",
    precision: str = "auto",
    compiled: bool = False,
    raw: bool = False,
    as_json: bool = False,
) -> None:
    """Continue each prompt `rows` times. One text streams to standard output; several are printed one after another.

    `sampling` holds the fields of `Sampling`. A prompt is text, `@FILE`, or `-` for standard input; `from_test` is the
    number of tokens of the test split to use instead. Text of a corpus with separate punctuation is printed as people
    write it, unless `raw` is true; JSON has the exact text and a readable form. The number of tokens and the speed go
    to standard error.

    Raises:
        Mistake, OSError: a sentence for each mistake.
    """
    trained = Trained(run, device, precision)
    problems, config, where = trained.problems, trained.config, trained.device
    problems += _problems(max_tokens, rows, from_test, prompts)
    draw = problems.attempt(lambda: Sampling(**sampling))
    found = trained.lengths(mem_len=() if mem_len is None else (mem_len,))
    if compiled and where is not None and found:
        problems += _compiling_problems(where, found[0], config.model.kind)
    if draw is None:
        problems.fail()
    problems.refuse()
    lengths = config.writing(found[0])
    texts: list[str | bytes] = [_read_prompt(prompt) for prompt in prompts]
    loaded = trained.load()
    if from_test is not None:
        texts = [_test_prompt(trained, loaded, from_test)]
    elif loaded.vocab.unit != "byte":
        read = zip(prompts, texts, strict=True)
        texts = [decoded(text, f"The prompt {name}") if isinstance(text, bytes) else text for name, text in read]
    counted = CountingVocab(loaded.vocab)
    for text in texts:
        counted.encode(text)
    counted.report("the prompt")
    texts = [text for text in texts or [""] for _ in range(rows)]
    neat, stream = is_tokenised(config.corpus.name) and not raw, len(texts) == 1 and not as_json
    options = {"precision": trained.precision, "compiled": compiled}
    written = _write(loaded, texts, lengths, draw, max_tokens, options, stream=stream, detokenise=neat)
    for number, (prompt, text) in enumerate(zip(texts, written, strict=True), start=1):
        exact = _shown(prompt) + text
        if as_json:
            form = {"readable": readable(exact)} if neat else {}
            print(json.dumps({"prompt": _shown(prompt), "text": text} | form))
        elif not stream:
            print(f"--- {number} ---\n{readable(exact) if neat else exact}")


def _write(
    loaded: LoadedModel,
    prompts: Sequence[str | bytes],
    lengths: Lengths,
    sampling: Sampling,
    max_tokens: int,
    options: Mapping[str, Any],
    *,
    stream: bool,
    detokenise: bool,
) -> list[str]:
    written = [""] * len(prompts)
    form = Detokeniser()
    feed, close = (form.feed, form.close) if detokenise else (str, str)
    if stream:
        print(feed(_shown(prompts[0])), end="", flush=True)
    start = time.perf_counter()
    for row, text in stream_text(loaded.model, loaded.vocab, prompts, lengths, sampling, max_tokens, **options):
        written[row] += text
        if stream:
            print(feed(text), end="", flush=True)
    seconds = time.perf_counter() - start
    if stream:
        print(close(), flush=True)
    tokens = max_tokens * len(prompts)
    if sampling.stop:
        tokens = sum(len(loaded.vocab.encode(text)) for text in written)
    print(f"{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s", file=sys.stderr)
    return written


def _problems(max_tokens: int, rows: int, from_test: int | None, prompts: Sequence[str]) -> Iterator[str]:
    if max_tokens < 1:
        yield f"--max-tokens must be at least 1, got {max_tokens}."
    if not 1 <= rows <= MOST_ROWS:
        yield f"--n must be at least 1 and at most {MOST_ROWS:,}, got {rows}."
    if from_test is not None and not 1 <= from_test <= MOST_CONTEXT:
        yield f"--from-test must be 1 to {MOST_CONTEXT} tokens, got {from_test}."
    if from_test is not None and prompts:
        yield "--from-test takes the prompt from the test set, so give it or a prompt, not both."
    if list(prompts).count("-") > 1:
        yield "Only one prompt can be -, because standard input is read once."


def _compiling_problems(device: torch.device, lengths: Lengths, kind: str) -> Iterator[str]:
    if kind != "transformer-xl":
        yield f"--compile is for models of kind transformer-xl, and this one's is {kind}. Leave it out."
    if lengths.mem_len == 0:
        yield "--compile needs a memory: without one each token reads a whole window again. Give --mem-len."
    if device.type != "cpu":
        yield f"--compile is for the CPU, got {device}, where a step is captured anyway. Leave it out."
    elif not has_compiler():
        yield "--compile must be left out on a CPU without a C++ compiler. Install g++, or leave it out."


def _read_prompt(prompt: str) -> str | bytes:
    if prompt == "-":
        return read_text("-")
    return read_text(prompt[1:]) if prompt.startswith("@") else prompt


def _test_prompt(trained: Trained, loaded: LoadedModel, tokens: int) -> str | bytes:
    ids = trained.text(loaded, None, "test", "test").split.ids
    ids = ids[len(loaded.vocab.opening) :][:tokens]
    return loaded.vocab.decode_bytes(ids) if loaded.vocab.unit == "byte" else loaded.vocab.decode(ids)


def _shown(prompt: str | bytes) -> str:
    return prompt.decode(errors="replace") if isinstance(prompt, bytes) else prompt
