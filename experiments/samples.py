"""Text as in the paper's appendix E: a context from the test split, the model's text, and the original text.

    python -m experiments.samples runs/wikitext2-small [--texts 3] [--context 512] [--tokens 300] [--seed 0]

The test split is cut into one equal part per text, and each part begins with a context, so nothing is selected. Tokens
are drawn from the 40 likeliest, as in the paper. Tokenised text is shown with normal spelling.
"""

from __future__ import annotations

import argparse

from transformer_xl.data.corpora.detokenise import readable

from transformer_xl import load_model
from transformer_xl.data.datasets import is_tokenised, open_corpus
from transformer_xl.evaluation.generate import Sampling, generate
from transformer_xl.runtime.device import prepare_process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    prepare_process()
    model, vocab, config = load_model(given.run)
    ids = open_corpus(config.corpus, vocab=vocab).split("test").ids
    starts = [len(ids) * number // given.texts for number in range(given.texts)]
    ends = [start + given.context for start in starts]
    decode = vocab.decode if vocab.is_text else vocab.decode_bytes
    contexts = [decode(ids[start:end]) for start, end in zip(starts, ends, strict=True)]
    written = generate(model, vocab, contexts, config.eval_lengths, Sampling(seed=given.seed), given.tokens)
    show = readable if is_tokenised(config.corpus.name) else str
    for number, (context, text, end) in enumerate(zip(contexts, written, ends, strict=True), start=1):
        shown = context if isinstance(context, str) else context.decode("utf-8", "replace")
        parts = {"Context": shown, "Transformer-XL": text, "Reference": vocab.decode(ids[end : end + given.tokens])}
        print(f"## {number}\n")
        for name, part in parts.items():
            print(f"**{name}**\n\n" + "\n".join(f"> {line}" for line in show(part).strip().splitlines()) + "\n")


if __name__ == "__main__":
    main()
