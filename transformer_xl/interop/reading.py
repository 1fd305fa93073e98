"""Read a checkpoint of another program as a model of this package, with the settings with which evaluating it gives the
same numbers as its own program."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from ..config import recipe as recipes
from ..config.settings import CorpusConfig, RunConfig
from ..config.values import fits, type_text
from ..data.vocab import Vocab
from ..mistake import Mistake, listing, shortened
from ..model.baselines import build_model
from ..model.transformer_xl import TransformerXL
from .huggingface import read_huggingface
from .mapping import fill, shape_of
from .pytorch import read_nvidia, read_original
from .source import Source
from .tensorflow import read_tensorflow

Program = Literal["original", "tensorflow", "huggingface", "nvidia"]
_READERS: Mapping[Program, Callable[[Path], Source]] = {
    "original": read_original,
    "tensorflow": read_tensorflow,
    "huggingface": read_huggingface,
    "nvidia": read_nvidia,
}
_SIZES = ("vocab_size", "n_layer", "n_head", "d_head", "d_model", "d_inner", "d_embed", "div_val")
_RATES = ("dropout", "dropatt", "init_std", "proj_init_std")
_BELIEVED = ("pre_lnorm", "layer_norm_epsilon", "cutoffs", *_RATES)
"""Settings of the model that do not follow from the arrays, or not always."""
_LENGTHS = ("tgt_len", "mem_len", "clamp_len", "same_length")
_KNOWN: Mapping[str, object] = {
    **dict.fromkeys(("tgt_len", "mem_len", "clamp_len", "div_val"), int),
    **dict.fromkeys(("pre_lnorm", "same_length"), bool),
    **dict.fromkeys((*_RATES, "layer_norm_epsilon"), float),
    "cutoffs": tuple[int, ...],
}
"""The stated settings that are used, by the original's names, and their types. All others follow from the arrays."""


class Imported(NamedTuple):
    """A converted checkpoint: settings, model, the vocabulary if the source has one, and a report on the arrays."""

    config: RunConfig
    model: TransformerXL
    """In eval mode, in float64 if an array is, otherwise in float32."""
    vocab: Vocab | None
    report: list[str]


def read_model(
    path: str | Path, program: Program, overrides: Sequence[str] = (), *, vocab: Vocab | None = None
) -> Imported:
    """Read a checkpoint of another program. Nothing in it is executed.

    Args:
        path: the file or folder that the program wrote.
        program: original (the authors' PyTorch code), tensorflow (the authors'), huggingface (TransfoXL) or nvidia.
        overrides: settings to change, `--section.field value ...`.
        vocab: the vocabulary, if the source has none or another one is wanted.

    Raises:
        ValueError: the checkpoint is of another kind; or arrays are missing, unexpected or of a wrong shape; or stated
            settings have a wrong type. The error lists all of them.
        FileNotFoundError: a file is missing.
    """
    if program not in _READERS:
        raise Mistake(f"--from must be one of {', '.join(_READERS)}, got {program!r}.")
    source = _READERS[program](Path(path))
    source.vocab = vocab or source.vocab
    config = run_settings(source, overrides)
    vocab, corpus = source.vocab, config.corpus
    if vocab is not None and (vocab.unit, vocab.newlines) != (corpus.unit, corpus.newlines):
        raise Mistake(
            f'corpus.unit and corpus.newlines must be those of the vocabulary, "{vocab.unit}" and "{vocab.newlines}", '
            f'got "{corpus.unit}" and "{corpus.newlines}". Leave them out.'
        )
    if source.vocab is not None and len(source.vocab) != config.model.vocab_size:
        raise Mistake(
            f"--vocab must hold as many tokens as there are weights for, {config.model.vocab_size:,}, and its own or "
            f"the one given has {len(source.vocab):,}. Give the vocabulary of the training."
        )
    with torch.random.fork_rng(devices=[]):  # the initial values are replaced
        model = build_model(config.model)
    if any(array.dtype == torch.float64 for array in source.arrays.values()):
        model = model.double()
    fill(model, source)
    return Imported(config, model.eval(), source.vocab, _report(source, config, model))


def _report(source: Source, config: RunConfig, model: TransformerXL) -> list[str]:
    """The report: the use of every array, and the assumptions."""
    numbers = sum(source.arrays[name].numel() for name in source.spelled)
    weights = sum(parameter.numel() for parameter in model.parameters())
    tied = f", {numbers - weights:,} of them copies of tied arrays" if numbers > weights else ""
    lines = [f"{len(source.spelled)} arrays ({numbers:,} numbers{tied}), each used once."]
    for reason in dict.fromkeys(source.left_out.values()):
        names = [shortened(name) for name, why in source.left_out.items() if why == reason]
        lines.append(f"Left out ({reason}): {listing(names, 1000)}.")
    lengths = config.eval_lengths
    window = f"clamp_len {lengths.clamp_len or 'none'}, attn_len {lengths.attn_len or 'all'}"
    lines.append(f"Evaluation has tgt_len {lengths.tgt_len}, mem_len {lengths.mem_len}, {window}.")
    return lines + source.notes


def run_settings(source: Source, overrides: Sequence[str] = ()) -> RunConfig:
    """The settings that fit a source's arrays. Assumptions are added to `source.notes`.

    Sizes follow from the arrays. The source states lengths, cutoffs and rates; otherwise they are taken from the
    packaged recipe whose weights have exactly this shape. `overrides` (`--section.field value ...`) change all of them.
    Raises `ValueError` if a stated setting has a wrong type, or a needed one is stated nowhere.
    """
    if source.run is not None:
        return recipes.changed_settings(_with_tokens(source.run, source.vocab), overrides)[0]
    stated = _statements(source)
    shape = shape_of(source, stated.get("div_val"))
    if "cutoffs" in stated:  # some programs add 0 and the size of the vocabulary
        stated["cutoffs"] = tuple(cutoff for cutoff in stated["cutoffs"] if 0 < cutoff < shape["vocab_size"])
    example = _recipe_like(source, stated | shape)
    rates = {name: getattr(example.model, name) for name in (*_RATES, "cutoffs")} if example else {}
    believed = {name: value for name, value in (rates | stated).items() if name in _BELIEVED}
    model = believed | shape | {"zero_memory": source.zero_memory}
    if shape["d_embed"] == shape["d_model"]:
        model["d_embed"] = None
    if "cutoffs" not in model and "model.cutoffs" not in recipes.parse_overrides(overrides):
        raise Mistake(
            f"{source.path} does not say where the bands of its vocabulary of {shape['vocab_size']:,} end: give "
            "--model.cutoffs, for instance 20000,40000,200000 for WikiText-103."
        )
    unstated = [name for name in (*_LENGTHS, "pre_lnorm") if name not in stated]
    if unstated and example is None:
        source.notes.append(f"Nothing states {', '.join(unstated)}: the defaults of this package are used.")
    sections = {"model": model, **_lengths(source, stated, example)}
    base = recipes.settings_in(_with_tokens(example or RunConfig(), source.vocab))
    kept = {name: value for name, value in base.items() if not name.startswith("model.")}
    try:
        return recipes.run_of(kept | recipes.settings_of(sections), overrides)
    except Mistake as error:
        raise Mistake("\n".join(f"{source.path}: {line}" for line in str(error).splitlines())) from error


def _with_tokens(run: RunConfig, vocab: Vocab | None) -> RunConfig:
    """`run` if its corpus has the tokens of this vocabulary, if one is known; otherwise with a corpus that has."""
    if vocab is None or (run.corpus.unit, run.corpus.newlines) == (vocab.unit, vocab.newlines):
        return run
    return replace(run, corpus=CorpusConfig(unit=vocab.unit, newlines=vocab.newlines))


def _statements(source: Source) -> dict[str, Any]:
    """The stated settings of the source that are used, with lists as tuples. Raises a `ValueError` that lists every
    stated setting that has a wrong type."""
    stated = {name: tuple(value) if isinstance(value, list) else value for name, value in source.stated.items()}
    problems = [
        f"{name} must be {type_text(kind)}, and is {shortened(reprlib.repr(stated[name]))}"
        for name, kind in _KNOWN.items()
        if name in stated and not fits(stated[name], kind)
    ]
    if problems:
        raise Mistake(f"{source.path} has settings of a wrong type: {'; '.join(problems)}.")
    return {name: stated[name] for name in _KNOWN if name in stated}


def _recipe_like(source: Source, model: Mapping[str, Any]) -> RunConfig | None:
    """The packaged recipe whose weights have this shape; None unless there is exactly one."""
    fitting = []
    for name in recipes.packaged_recipes():
        config = recipes.load_recipe(name)
        theirs = {size: getattr(config.model, size) for size in _SIZES} | {"d_embed": config.model.embed_width}
        same = config.model.kind == "transformer-xl" and all(model[size] == theirs[size] for size in _SIZES)
        if same and model.get("cutoffs", config.model.cutoffs) == config.model.cutoffs:
            fitting.append((name, config))
    if len(fitting) != 1:
        return None
    [(name, config)] = fitting
    source.notes.append(f"What is not stated of corpus, lengths and rates is as in the recipe {name}, of this shape.")
    return config


def _lengths(source: Source, stated: Mapping[str, Any], example: RunConfig | None) -> dict[str, dict[str, int | None]]:
    """The lengths of training and of evaluation, from the recipe of the same shape and the stated settings. The
    original and NVIDIA's code state the lengths of training; the others state the lengths of evaluation. Without a
    recipe, stated lengths are for both."""
    run = example or RunConfig()
    for_train = stated if source.states_training or example is None else {}
    for_test = stated if example is None or not source.states_training else {}
    train = _with_stated(asdict(run.train.lengths), for_train, source.same_length)
    test = _with_stated(asdict(run.eval_lengths), for_test, source.same_length)
    for name in ("clamp_len", "attn_len"):
        if test[name] is None and train[name] is not None:  # in [eval] none means: as in training
            source.notes.append(f"Its evaluation has no {name}; here it has that of training, {train[name]}.")
    return {"train": train, "eval": {name: None if test == train else value for name, value in test.items()}}


def _with_stated(lengths: dict[str, int | None], stated: Mapping[str, Any], extra: int) -> dict[str, int | None]:
    """These lengths, replaced by stated ones. `same_length` means `mem_len` plus `extra` keys."""
    changed = lengths | {name: stated[name] for name in ("tgt_len", "mem_len") if name in stated}
    if "clamp_len" in stated:
        changed["clamp_len"] = stated["clamp_len"] if stated["clamp_len"] > 0 else None
    same_length = stated.get("same_length", lengths["attn_len"] == lengths["mem_len"])
    if same_length or "same_length" in stated:
        # Without a memory it would hide all keys, and means nothing.
        changed["attn_len"] = ((changed["mem_len"] or 0) + extra or None) if same_length else None
    return changed
