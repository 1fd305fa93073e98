"""Export a trained model as a folder that Hugging Face's transformers loads, with or without this package:

    model.safetensors, config.json, generation_config.json   the weights by our names after `model.`, tied ones once
    modeling_transformer_xl.py and the files it imports      from this package, with imports rewritten for one folder
    tokenizer.json, tokenizer_config.json                    the vocabulary, unless the tokens are ids without text
    tokenization_transformer_xl.py                           its class
    transformer_xl_vocab.json                                the vocabulary as a `Vocab`, for importing the folder
    README.md, LICENSE                                       the model card and the code's licence

So this package has only one copy of the model's code.
"""

from __future__ import annotations

import ast
import json
from dataclasses import asdict, replace
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from ... import __version__
from ...config.settings import RunConfig
from ...mistake import Mistake
from ...model.transformer_xl import TransformerXL
from ...run.checkpoint import LoadedModel
from ...run.parts import EXPORTED_VOCAB, dimensions, write_errors, write_json
from ...runtime.files import last_part, read_table, whole_folder
from ..huggingface import OWN_TYPE, SCORE, weights_of
from ..reading import read_model
from . import modeling_transformer_xl as modeling
from .tokenizer import fast_tokenizer

_PACKAGE = Path(__file__).parents[2]
_FIRST = ("interop", "hf", "modeling_transformer_xl")
_TOKENIZER = ("interop", "hf", "tokenization_transformer_xl")


def export_huggingface(loaded: LoadedModel, folder: str | Path) -> None:
    """Write `loaded` as such a folder, which replaces an earlier one. After an error nothing is changed.

    Raises:
        ValueError: the model is one of the paper's baselines.
        OSError: a sentence with the reason, for instance a full disk.
    """
    model, vocab, run = loaded
    if (kind := model.config.kind) != "transformer-xl":
        raise Mistake(f"--to-format huggingface is for models of kind transformer-xl, and this one's is {kind}.")
    config = config_of_run(run, model, {"bos_token_id": vocab.line_end or 0})
    with torch.device("meta"):
        wrapped = modeling.TransformerXLForCausalLM(config)
    wrapped.model = model
    # An empty prompt starts after a line end, as in our `generate`. A line end does not end a text.
    wrapped.generation_config = GenerationConfig(bos_token_id=config.bos_token_id)
    with whole_folder(Path(folder)) as unfinished:
        logging.disable_progress_bar()  # transformers shows one even without a terminal
        with write_errors():
            wrapped.save_pretrained(unfinished)
        if vocab.unit != "id":
            fast_tokenizer(vocab, model.config.document_end).save_pretrained(unfinished)
            code, _ = _rewritten(_TOKENIZER)
            (unfinished / f"{_TOKENIZER[-1]}.py").write_text(code, encoding="utf-8")
        write_json(unfinished / EXPORTED_VOCAB, vocab.to_json())
        (unfinished / "README.md").write_text(_card(loaded, Path(folder).name), encoding="utf-8")


def config_of_run(run: RunConfig, model: TransformerXL, more: dict[str, Any]) -> modeling.TransformerXLHFConfig:
    """The settings of a folder with this model, and `more` of transformers."""
    # A path would mean another file elsewhere, and describe the user's folders.
    name, vocab = (path if path == last_part(path) else "" for path in (run.corpus.name, run.corpus.vocab))
    corpus = replace(run.corpus, name=name, vocab=vocab)
    sections = {name: section for name, section in asdict(replace(run, corpus=corpus)).items() if name != "model"}
    settings = asdict(model.config) | asdict(run.writing_lengths(run.eval_lengths))
    settings["run"] = json.loads(json.dumps(sections))
    return modeling.TransformerXLHFConfig(**settings | more)


def read_classifier(folder: str | Path) -> modeling.TransformerXLForSequenceClassification:
    """The model of a folder of `TransfoXLForSequenceClassification` (transformers 2 to 4), whose classes are computed
    from the last token of a text. Save it by `save_pretrained`.

    Raises:
        Mistake: the folder has another model.
    """
    path = Path(folder)
    stated = read_table(path / "config.json", "Get the whole folder.")
    if stated.get("model_type") == OWN_TYPE:
        raise Mistake(f"{path} is of this package: AutoModelForSequenceClassification.from_pretrained loads it.")
    found = read_model(path, "huggingface")
    score = weights_of(path).get(SCORE)
    if score is None or score.ndim != 2 or score.shape[1] != found.model.config.d_model:
        has = "none" if score is None else dimensions(score.shape)
        raise Mistake(f"{path} must have a classifier's {SCORE}, [classes, {found.model.config.d_model}], got {has}.")
    kept = {name: stated[name] for name in ("id2label", "label2id", "problem_type") if name in stated}
    config = config_of_run(found.config, found.model, {"pooling": "last", "num_labels": len(score)} | kept)
    model = modeling.TransformerXLForSequenceClassification(config)
    model.model.load_state_dict(found.model.state_dict())
    model.score.weight = torch.nn.Parameter(score.float())
    return model.eval()


def write_source(folder: str | Path) -> dict[str, str]:
    """Write the code into `folder`, and return its `auto_map`: the classes that transformers loads from it."""
    licence = distribution("transformer-xl").read_text("licenses/LICENSE")
    assert licence, "the package is installed without its LICENSE"
    for name, content in (source_files() | {"LICENSE": licence}).items():
        (Path(folder) / name).write_text(content, encoding="utf-8")
    owners = {
        "AutoConfig": modeling.TransformerXLHFConfig,
        "AutoModel": modeling.TransformerXLModel,
        "AutoModelForCausalLM": modeling.TransformerXLForCausalLM,
        "AutoModelForSequenceClassification": modeling.TransformerXLForSequenceClassification,
    }
    return {auto: f"{_FIRST[-1]}.{owner.__name__}" for auto, owner in owners.items()}


def source_files() -> dict[str, str]:
    """The content of the modeling file and of each file of the package that it needs, by name in the folder."""
    contents: dict[str, str] = {}
    wanted = [_FIRST]
    while wanted:
        module = wanted.pop()
        if _flat(module) not in contents:
            contents[_flat(module)], needed = _rewritten(module)
            wanted += needed
    # Before 5.10, transformers copies only files that the modeling file imports by "from .".
    others = [name for name in contents if name != _FIRST[-1]]
    contents[_FIRST[-1]] += "".join(f"from .{name} import __name__ as _\n" for name in others)
    return {f"{name}.py": content for name, content in contents.items()}


def _rewritten(module: tuple[str, ...]) -> tuple[str, list[tuple[str, ...]]]:
    """A file with imports rewritten for one folder, and the modules of this package that it imports."""
    folder = _PACKAGE.joinpath(*module)
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    source = path.read_text(encoding="utf-8")
    package = module if folder.is_dir() else module[:-1]
    lines, needed = source.splitlines(), []
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    for node in sorted(imports, key=lambda node: node.lineno, reverse=True):
        if node.level:
            base = package[: len(package) - node.level + 1]
            if node.module:
                targets = [(*base, *node.module.split("."))]
                node.module = _flat(targets[0])
            else:
                targets = [(*base, alias.name) for alias in node.names]
                for alias, target in zip(node.names, targets, strict=True):
                    alias.name, alias.asname = _flat(target), alias.asname or alias.name
            node.level = 1
            lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + ast.unparse(node)]
            needed += targets
        elif node.module == "jaxtyping":  # a shape is an annotation there
            names = ", ".join(f"Annotated as {alias.name}" for alias in node.names)
            lines[node.lineno - 1 : node.end_lineno] = [f"from typing import {names}"]
    origin = f"# transformer_xl/{path.relative_to(_PACKAGE).as_posix()} of transformer-xl {__version__}, MIT licence"
    return "\n".join([f"{origin}; its imports are rewritten for this folder.", *lines, ""]), needed


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
segment, and each layer also attends to its inputs of the segments before.

| | |
|---|---|
| vocabulary | {vocab} |
| parameters | {parameters:,} |
| layers, heads, width | {shape.n_layer}, {shape.n_head}, {shape.d_model} |
| trained on | {corpus} |
| segment and memory in training | {train.tgt_len}, {train.mem_len} tokens |
| segment and memory in use | {test.tgt_len}, {test.mem_len} tokens (`config.tgt_len`, `config.mem_len`) |

{example}`trust_remote_code=True` runs the Python files of this folder (`LICENSE` has their licence), so read them
first. It is not needed after `import transformer_xl.hf`, where that package is installed.

`logits` are log-probabilities. `past_key_values` is the memory: `model(new, past_key_values=memory)` takes the new
tokens only, and `model.generate(text, past_key_values=memory)` the whole text so far. From transformers 5.24 on, its
name is `cache`. Texts of a batch are padded on the left and have an attention mask.
"""
_EXAMPLE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "{name}"  # the path of this folder
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer("the ", return_tensors="pt")
ids = model.generate(**inputs, max_new_tokens=100, do_sample=True, top_k=40)
print(tokenizer.decode(ids[0]))
```

"""


def _card(loaded: LoadedModel, name: str) -> str:
    run = loaded.config
    return _CARD.format(
        name=name,
        example="" if loaded.vocab.unit == "id" else _EXAMPLE.format(name=name),
        vocab=loaded.vocab,
        parameters=sum(weight.numel() for weight in loaded.model.parameters()),
        shape=loaded.model.config,
        corpus=Path(run.corpus.name).name or "unknown",
        train=run.train,
        test=run.writing_lengths(run.eval_lengths),
    )
