"""Exports a trained model as a folder that Hugging Face's transformers loads, with or without this package:

    model.safetensors, config.json, generation_config.json   the weights by our names under `model.`, tied ones once
    modeling_transformer_xl.py and the files it imports      this package's own, with imports rewritten for one folder
    tokenizer.json, tokenizer_config.json                    the vocabulary
    transformer_xl_vocab.json                                the vocabulary as `Vocab` keeps it, for the way back
    README.md, LICENSE                                       the model card, and the code's licence

No second copy of the model's code is maintained. An import that cannot be rewritten stops the export.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import distribution
from pathlib import Path

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from ... import __version__
from ...checkpoint import EXPORTED_VOCAB, LoadedModel, write_json
from ...mistake import Mistake
from ...runtime.files import whole_folder
from .modeling_transformer_xl import TransformerXLForCausalLM, TransformerXLHFConfig
from .tokenizer import fast_tokenizer

_PACKAGE = Path(__file__).parents[2]
_FIRST = ("interop", "hf", "modeling_transformer_xl")
_FOUND_THERE = {"torch", "transformers", "typing_extensions", *sys.stdlib_module_names}


def export_huggingface(loaded: LoadedModel, folder: str | Path) -> None:
    """Write `loaded` as such a folder, whole or not at all. It replaces a folder that exists.

    Raises:
        ValueError: it is one of the paper's baselines.
        OSError: one sentence with the reason, for instance a full disk.
    """
    model, vocab, run = loaded
    if model.config.kind != "transformer-xl":
        kind = model.config.kind
        raise Mistake(f"--to-format huggingface is for models of kind transformer-xl, and this one's is {kind}.")
    sections = {name: section for name, section in asdict(run).items() if name != "model"}
    config = TransformerXLHFConfig(
        **asdict(model.config),
        **asdict(run.eval_lengths),
        run=json.loads(json.dumps(sections)),
        bos_token_id=vocab.line_end or 0,
    )
    with torch.device("meta"):
        wrapped = TransformerXLForCausalLM(config)
    wrapped.model = model
    # An empty prompt starts after a line end, as in our `generate`, and a text goes on after its line ends.
    wrapped.generation_config = GenerationConfig(bos_token_id=config.bos_token_id)
    with whole_folder(Path(folder)) as unfinished:
        with _no_bar():
            wrapped.save_pretrained(unfinished)
        fast_tokenizer(vocab).save_pretrained(unfinished)
        write_json(unfinished / EXPORTED_VOCAB, vocab.to_json())
        (unfinished / "README.md").write_text(_card(loaded, Path(folder).name), encoding="utf-8")


@contextmanager
def _no_bar() -> Iterator[None]:
    """transformers shows a progress bar even without a terminal."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def write_source(folder: str | Path) -> dict[str, str]:
    """Write the code into `folder`, and return the classes that transformers takes from it: its `auto_map`."""
    licence = distribution("transformer-xl").read_text("licenses/LICENSE")
    assert licence, "the package is installed without its LICENSE"
    for name, content in (source_files() | {"LICENSE": licence}).items():
        (Path(folder) / name).write_text(content, encoding="utf-8")
    owners = {"AutoConfig": TransformerXLHFConfig, "AutoModelForCausalLM": TransformerXLForCausalLM}
    return {auto: f"{_FIRST[-1]}.{owner.__name__}" for auto, owner in owners.items()}


def source_files() -> dict[str, str]:
    """The modeling file and each file of the package that it needs, by their names in one folder."""
    contents: dict[tuple[str, ...], str] = {}
    wanted = [_FIRST]
    while wanted:
        module = wanted.pop()
        if module not in contents:
            contents[module], needed = _rewritten(module)
            wanted += needed
    # Before 5.10, transformers copies only the files that the first one names after "from .".
    others = [_flat(module) for module in contents if module != _FIRST]
    contents[_FIRST] += "".join(f"from .{name} import __name__ as _\n" for name in others)
    files = {f"{_flat(module)}.py": content for module, content in contents.items()}
    assert len(files) == len(contents), f"two of {sorted(contents)} would have one name in the folder"
    return files


def _rewritten(module: tuple[str, ...]) -> tuple[str, list[tuple[str, ...]]]:
    """A file with imports that fit one folder and need only torch and transformers, and the modules it imports."""
    path = _path(module)
    source = path.read_text(encoding="utf-8")
    package = module if path.name == "__init__.py" else module[:-1]
    lines, needed = source.splitlines(), []
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in sorted(imports, key=lambda node: node.lineno, reverse=True):
        new, targets = _import(node, package, path)
        lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + line for line in new]
        needed += targets
    origin = f"# transformer_xl/{path.relative_to(_PACKAGE).as_posix()} of transformer-xl {__version__}, MIT licence"
    content = "\n".join([f"{origin}; its imports are rewritten for this folder.", *lines, ""])
    ast.parse(content)
    return content, needed


def _import(
    node: ast.Import | ast.ImportFrom, package: tuple[str, ...], path: Path
) -> tuple[list[str], list[tuple[str, ...]]]:
    """An import's new lines, and the modules of this package that it names."""
    names = ", ".join(map(ast.unparse, node.names))
    if isinstance(node, ast.ImportFrom) and node.module == "jaxtyping":
        return [], []  # annotations are not evaluated there
    if isinstance(node, ast.Import) or not node.level:
        tops = [a.name for a in node.names] if isinstance(node, ast.Import) else [str(node.module)]
        strange = {top.partition(".")[0] for top in tops} - _FOUND_THERE
        assert not strange, f"{path} imports {strange}, which an exported folder cannot count on"
        return [ast.unparse(node)], []
    base = (*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else ()))
    if node.module:
        return [f"from .{_flat(base)} import {names}"], [base]
    modules = [(*base, alias.name) for alias in node.names]
    whole = [f"{_flat(m)} as {a.asname or a.name}" for m, a in zip(modules, node.names, strict=True)]
    return [f"from . import {', '.join(whole)}"], modules


def _path(module: tuple[str, ...]) -> Path:
    folder = _PACKAGE.joinpath(*module)
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    assert module and path.is_file(), f"{'.'.join(module) or 'the package'} is no file that can be exported"
    return path


def _flat(module: tuple[str, ...]) -> str:
    return "_".join(module[2:] if module[:2] == _FIRST[:2] else module)


_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- transformer-xl
---

# {name}

A Transformer-XL language model ([Dai et al., 2019](https://arxiv.org/abs/1901.02860)): it reads a text segment by
segment, and each layer attends to its own outputs for the segments before.

| | |
|---|---|
| vocabulary | {vocab} |
| parameters | {parameters:,} |
| layers, heads, width | {shape.n_layer}, {shape.n_head}, {shape.d_model} |
| trained on | {corpus} |
| segment and memory in training | {train.tgt_len}, {train.mem_len} tokens |
| segment and memory in use | {test.tgt_len}, {test.mem_len} tokens (`config.tgt_len`, `config.mem_len`) |

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "{name}"  # the path of this folder
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer("the ", return_tensors="pt")
ids = model.generate(**inputs, max_new_tokens=100, do_sample=True, top_k=40)
print(tokenizer.decode(ids[0]))
```

`trust_remote_code=True` runs the Python files of this folder (`LICENSE` has their licence), so read them first. It is
not needed after `import transformer_xl.hf`, where that package is installed.

`logits` are log-probabilities. `past_key_values` is the memory: give it to the next call to continue the text.
`model(new, past_key_values=memory)` takes the new tokens only; `model.generate(text, past_key_values=memory)` takes the
whole text so far, such as the `sequences` that came with the memory. After beam search, read the text again, because
the memory is that of other beams.

A text goes on after a line end; to stop at one, give `generate` its id as `eos_token_id`. `stop_strings` work with
bytes and byte pairs; with words or characters, use `eos_token_id` or a `StoppingCriteria`.

Texts of a batch are padded on the left and have an attention mask. The padding of bytes and byte pairs is byte 0xFF. If
the tokenizer has no `pad_token`, set it to a rare token, which transformers then drops from decoded texts and labels. A
`pipeline` decodes its new text by itself: end a prompt of words with a space.
"""


def _card(loaded: LoadedModel, name: str) -> str:
    run = loaded.config
    return _CARD.format(
        name=name,
        vocab=loaded.vocab,
        parameters=sum(weight.numel() for weight in loaded.model.parameters()),
        shape=loaded.model.config,
        corpus=Path(run.corpus.name).name or "unknown",
        train=run.train,
        test=run.eval_lengths,
    )
