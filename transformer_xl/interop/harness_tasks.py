"""Tasks of lm-evaluation-harness made from prepared corpora: perplexity on the test split.

A task is a folder of three files, which other models of the harness can read, too (`lm_eval --include_path FOLDER`):

    NAME.jsonl         a document a line: its text, and how many words and bytes are scored
    NAME.yaml          the settings of the task
    scored_counts.py   divides the log-probability of a document by these counts

A document begins with the line end after which it is read. All tokens after that are scored, line ends too, as
`txl eval` and the literature count them. So `txl eval RUN --data NAME.jsonl` gives the same perplexity.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..data.corpus import Corpus
from ..data.datasets import cache_folder, open_corpus
from ..runtime.files import whole_folder

_ARTICLE = re.compile(r"(?:^|(?<=\n))\n(?== (?!=)[^\n]*(?<!=) =\n\n)")
"""The blank line before an article's title, `= Title =`, which a blank line follows. Sections have more signs."""

_YAML = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text[1:]}}}}"
process_results: !function scored_counts.process_results
metric_list:
  - {{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}}
  - {{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}}
  - {{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}}
metadata:
  version: 1.0
"""
_COUNTS = '''\
"""The figures of a document: its log-probability in nats, with the words and bytes that are scored."""


def process_results(document, results):
    (log_prob,) = results
    words, size = (log_prob, document["words"]), (log_prob, document["bytes"])
    return {"word_perplexity": words, "byte_perplexity": size, "bits_per_byte": size}
'''


class Task(NamedTuple):
    """A corpus, and the function that cuts its text into documents."""

    corpus: str
    cut: Callable[[str], list[str]]


def one_document(text: str) -> list[str]:
    """The whole text, after a line end."""
    return ["\n" + text]


def articles(text: str) -> list[str]:
    """The articles of WikiText, each from the blank line before its title on."""
    starts = [match.start() for match in _ARTICLE.finditer(text)]
    starts = [0, *(start for start in starts if start > 0)]
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


TASKS = {"txl_ptb": Task("ptb", one_document), "txl_wikitext2": Task("wikitext-2", articles)}


def corpus_of(name: str) -> Corpus:
    """The corpus of a task. Raises `FileNotFoundError` if it is not prepared."""
    return open_corpus(TASKS[name].corpus)


def task_documents(name: str, corpus: Corpus) -> Iterator[dict[str, Any]]:
    """The documents of the test split: `text`, and the `words` (with line ends) and `bytes` that are scored.

    Bytes are those of `txl eval`: a word has one more for the space after it, a line end has one.
    """
    vocab, sizes = corpus.vocab, corpus.vocab.token_sizes()
    assert sizes is not None, "words have a size"
    for text in TASKS[name].cut(vocab.decode(corpus.split("test").ids)):
        scored = vocab.encode(text)[1:]
        yield {"text": text, "words": len(scored), "bytes": int(sizes[scored].sum())}


def write_task(name: str, corpus: Corpus) -> Path:
    """Write the folder of a task into the cache, and return it."""
    folder = cache_folder() / "harness" / name
    with whole_folder(folder) as unfinished:
        lines = (json.dumps(document) + "\n" for document in task_documents(name, corpus))
        (unfinished / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        yaml = _YAML.format(name=name, file=json.dumps(str(folder.absolute() / f"{name}.jsonl")))
        (unfinished / f"{name}.yaml").write_text(yaml, encoding="utf-8")
        (unfinished / "scored_counts.py").write_text(_COUNTS, encoding="utf-8")
    return folder
