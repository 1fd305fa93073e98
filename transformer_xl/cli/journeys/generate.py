"""`txl generate`: generate text with a trained model, and print it token by token."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence

import torch

from ...config.settings import Lengths
from ...data.corpora.detokenise import Detokeniser, readable
from ...data.datasets import is_tokenised
from ...evaluation.generate import Sampling, stream_text
from ...model.inference import has_compiler
from ...run import LoadedModel
from ..options.use import Generate
from .texts import read_text, report_unknown, text_of
from .trained import Trained

MOST_CONTEXT = 512
"""Maximum number of tokens of the test split in a prompt: the paper's context (Appendix E)."""
MOST_ROWS = 1 << 16


def generate(options: Generate) -> None:
    """Continue each prompt. A single text is printed token by token; several texts are printed when all are done.

    If the corpus has spaces around punctuation, text is printed in readable form unless `--raw` is given; JSON has the
    exact text and the readable form. The number of tokens and the speed go to standard error.
    """
    trained = Trained(options.folder, options.device, options.precision)
    problems, config = trained.problems, trained.config
    problems.bound(options, "max_tokens", least=1)
    problems.bound(options, "n", least=1, most=MOST_ROWS)
    problems.bound(options, "from_test", least=1, most=MOST_CONTEXT)
    if options.from_test is not None and options.prompt:
        problems.append("--from-test takes the prompt from the test set, so give it or a prompt, not both.")
    names = ("temperature", "top_k", "top_p", "seed", "stop")
    sampling = problems.attempt(lambda: Sampling(**{name: getattr(options, name) for name in names}))
    found = trained.lengths(options)
    if options.compile and trained.device is not None and found:
        problems += _compiling_problems(trained.device, found[0], config.model.kind)
    problems.refuse()
    assert sampling is not None, "what is refused has a problem"
    read = [_read_prompt(prompt) for prompt in options.prompt]
    loaded = trained.load(step=not options.compile)
    texts = _prompts(options, read, trained, loaded)
    report_unknown(loaded.vocab, texts, "the prompt")
    texts = [text for text in texts or [""] for _ in range(options.n)]
    neat = is_tokenised(config.corpus.name) and not options.raw
    lengths, how = config.writing_lengths(found[0]), {"precision": trained.precision, "compiled": options.compile}
    pieces = stream_text(loaded.model, loaded.vocab, texts, lengths, sampling, options.max_tokens, **how)
    written = _write(loaded, texts, pieces, options, neat=neat)
    if len(texts) == 1 and not options.json:
        return
    for number, (prompt, text) in enumerate(zip(texts, written, strict=True), start=1):
        exact = _prompt_text(prompt) + text
        if options.json:
            form = {"readable": readable(exact)} if neat else {}
            print(json.dumps({"prompt": _prompt_text(prompt), "text": text} | form))
        else:
            print(f"--- {number} ---\n{readable(exact) if neat else exact}")


def _write(
    loaded: LoadedModel,
    prompts: Sequence[str | bytes],
    pieces: Iterator[tuple[int, str]],
    options: Generate,
    *,
    neat: bool,
) -> list[str]:
    """The text after each prompt. A single one is printed while it is generated, in readable form if `neat`."""
    written, streams = [""] * len(prompts), len(prompts) == 1 and not options.json
    form = Detokeniser()
    feed, close = (form.feed, form.close) if neat else (str, str)
    if streams:
        print(feed(_prompt_text(prompts[0])), end="", flush=True)
    start = time.perf_counter()
    for row, text in pieces:
        written[row] += text
        if streams:
            print(feed(text), end="", flush=True)
    seconds = time.perf_counter() - start
    if streams:
        print(close(), flush=True)
    tokens = options.max_tokens * len(prompts)
    if options.stop:
        tokens = sum(len(loaded.vocab.encode(text)) for text in written)
    print(f"{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s", file=sys.stderr)
    return written


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


def _prompts(
    options: Generate, read: Sequence[str | bytes], trained: Trained, loaded: LoadedModel
) -> Sequence[str | bytes]:
    """The texts to continue, in the form that the model reads."""
    if options.from_test is not None:
        ids = trained.text(loaded.vocab, None, "test", "test").split.ids
        ids = ids[len(loaded.vocab.opening_ids) :][: options.from_test]
        return [loaded.vocab.decode_bytes(ids) if loaded.vocab.unit == "byte" else loaded.vocab.decode(ids)]
    if loaded.vocab.unit == "byte":
        return read
    named = zip(options.prompt, read, strict=True)
    return [text_of(text, f"The prompt {name}") if isinstance(text, bytes) else text for name, text in named]


def _prompt_text(prompt: str | bytes) -> str:
    return prompt.decode(errors="replace") if isinstance(prompt, bytes) else prompt
