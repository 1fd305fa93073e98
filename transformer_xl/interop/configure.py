"""Find the settings with which evaluating a converted source gives the same numbers as its own program."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ..config.recipe import (
    Setting,
    changed_settings,
    load_recipe,
    packaged_recipes,
    parse_overrides,
    run_of,
    settings_in,
)
from ..config.settings import CorpusConfig, RunConfig
from ..config.values import fits, type_text
from ..mistake import Mistake, shortened
from .mapping import shape_of
from .source import Source

_OTHER_NAMES = {"n_token": "vocab_size"}
_SIZES = ("vocab_size", "n_layer", "n_head", "d_head", "d_model", "d_inner", "d_embed", "div_val")
"""Settings that follow from the arrays. A source that states other values is damaged."""
_RATES = ("dropout", "dropatt", "init_std", "proj_init_std")
_BELIEVED = ("tie_weight", "pre_lnorm", "layer_norm_epsilon", "tie_projs", *_RATES)
"""Settings that do not follow from the arrays, or not with certainty."""
_LENGTHS = ("tgt_len", "mem_len", "clamp_len", "same_length")
_KNOWN: dict[str, Any] = {
    **dict.fromkeys((*_SIZES, "tgt_len", "mem_len", "clamp_len", "ext_len", "attn_type"), int),
    **dict.fromkeys(("tie_weight", "pre_lnorm", "same_length", "untie_r", "proj_share_all_but_first"), bool),
    **dict.fromkeys((*_RATES, "layer_norm_epsilon", "emb_scale"), float),
    "cutoffs": tuple[int, ...],
    "tie_projs": tuple[bool, ...],
    "evaluation": dict,
}
"""The stated settings that are used, by the original's names, and their types."""


def run_settings(source: Source, overrides: Sequence[str] = ()) -> RunConfig:
    """The settings that fit a source's arrays. Assumptions are added to `source.notes`.

    Sizes follow from the arrays. The source states lengths, cutoffs and rates; otherwise they are taken from the
    packaged recipe whose weights have exactly this shape. `overrides` (`--section.field value ...`) change all of them.

    Raises:
        ValueError: a stated setting contradicts the arrays, or a needed one is stated nowhere.
    """
    if source.run is not None:
        return changed_settings(source.run, overrides)[0]
    shape = shape_of(source)
    stated = _statements(source, shape)
    example = _recipe_like(source, shape | stated)
    model = _model(source, stated, shape, example)
    asked = [setting.field for setting in parse_overrides(overrides, [])]
    if "cutoffs" not in {*model, *asked}:
        raise Mistake(
            f"{source.path} does not say where the bands of its vocabulary of {shape['vocab_size']:,} end: give "
            "--model.cutoffs, for instance 20000,40000,200000 for WikiText-103."
        )
    wanted_here = _LENGTHS if source.program == "tensorflow" else (*_LENGTHS, "pre_lnorm")
    unstated = [name for name in wanted_here if name not in stated]
    if unstated and example is None:
        source.notes.append(f"Nothing states {', '.join(unstated)}: the defaults of this package are used.")
    sections = {"model": model, **_lengths(source, stated, example)}
    facts = [
        Setting(section, name, value, f"{section}.{name}", f" of {source.path}")
        for section, values in sections.items()
        for name, value in values.items()
    ]
    base = example or RunConfig()
    vocab = source.vocab
    if vocab is not None and (base.corpus.unit, base.corpus.newlines) != (vocab.unit, vocab.newlines):
        base = replace(base, corpus=CorpusConfig(unit=vocab.unit, newlines=vocab.newlines))
    return run_of([*(setting for setting in settings_in(base) if setting.section != "model"), *facts], overrides)


def _model(
    source: Source, stated: Mapping[str, Any], shape: Mapping[str, Any], example: RunConfig | None
) -> dict[str, Any]:
    """The settings of the model, without `cutoffs` if they are unknown."""
    model: dict[str, Any] = {
        **({name: getattr(example.model, name) for name in (*_RATES, "cutoffs")} if example else {}),
        "layer_norm_epsilon": source.dialect.layer_norm_epsilon,
        "zero_memory": source.dialect.zero_memory,
        **{name: value for name, value in shape.items() if name != "bands"},
        **{name: stated[name] for name in (*_BELIEVED, "cutoffs") if name in stated},
    }
    if "tie_projs" not in shape or not any(model["tie_projs"]):
        model["tie_projs"] = ()
    if shape["d_embed"] == shape["d_model"]:
        model["d_embed"] = None
    if stated.get("emb_scale", shape["d_model"] ** 0.5) != shape["d_model"] ** 0.5:
        model["embedding_scale"] = stated["emb_scale"]
    return model


def _statements(source: Source, shape: Mapping[str, Any]) -> dict[str, Any]:
    """The stated settings of the source in our form.

    Raises:
        ValueError: lists every stated setting that has a wrong type or contradicts the arrays.
    """
    problems: list[str] = []
    stated: dict[str, Any] = {}
    for theirs, value in source.stated.items():
        name = _OTHER_NAMES.get(theirs, theirs)
        value = tuple(value) if isinstance(value, list) else value
        if name not in _KNOWN:
            continue
        if _is_table_of_lengths(value) if name == "evaluation" else fits(value, _KNOWN[name]):
            stated[name] = value
        else:
            kind = "a table of lengths" if name == "evaluation" else type_text(_KNOWN[name])
            problems.append(f"{theirs} must be {kind}, and is {shortened(reprlib.repr(value))}")
    if "cutoffs" in stated:  # some programs add 0 and the size of the vocabulary
        stated["cutoffs"] = tuple(cutoff for cutoff in stated["cutoffs"] if 0 < cutoff < shape["vocab_size"])
    if stated.get("proj_share_all_but_first") and shape["bands"] > 1:
        stated.setdefault("tie_projs", (False, *[True] * (shape["bands"] - 1)))
    problems += _contradictions(source, stated, shape)
    if problems:
        raise Mistake(f"{source.path} does not agree with itself: {'; '.join(problems)}.")
    return stated


def _is_table_of_lengths(value: Any) -> bool:
    known = (*_LENGTHS, "ext_len")
    return isinstance(value, dict) and all(name in known and fits(v, _KNOWN[name]) for name, v in value.items())


def _contradictions(source: Source, stated: Mapping[str, Any], shape: Mapping[str, Any]) -> Iterator[str]:
    certain = {name: shape[name] for name in (*_SIZES, "cutoffs") if name in shape} | {"attn_type": 0}
    if shape["n_layer"] > 1:
        certain["untie_r"] = shape["untie_r"]
    for name, value in certain.items():
        if stated.get(name, value) != value:
            yield f"{name} is stated as {shortened(str(stated[name]))}, and is {value} by its arrays"
    bands, cutoffs = shape["bands"], stated.get("cutoffs", ())
    if len(cutoffs) not in (0, bands - 1):
        yield f"cutoffs must be {bands - 1} for its {bands} bands, and are {shortened(str(cutoffs))}"
    if "tie_projs" in shape and len(stated.get("tie_projs", shape["tie_projs"])) != bands:
        yield f"tie_projs must hold a value for each of {bands} bands"


def _recipe_like(source: Source, model: Mapping[str, Any]) -> RunConfig | None:
    """The packaged recipe whose weights have this shape; None unless there is exactly one."""
    fitting = []
    for name in packaged_recipes():
        config = load_recipe(name)
        theirs = {size: getattr(config.model, size) for size in _SIZES} | {"d_embed": config.model.embed_width}
        same = config.model.kind == "transformer-xl" and all(model[size] == theirs[size] for size in _SIZES)
        if same and model.get("cutoffs", config.model.cutoffs) == config.model.cutoffs:
            fitting.append((name, config))
    if len(fitting) != 1:
        return None
    [(name, config)] = fitting
    source.notes.append(f"What is not stated of corpus, lengths and rates is as in the recipe {name}, of this shape.")
    return config


def _lengths(source: Source, stated: Mapping[str, Any], example: RunConfig | None) -> dict[str, dict[str, Any]]:
    """The lengths of training and of evaluation, from the recipe of the same shape and the stated settings.

    The original and NVIDIA's code state the lengths of training; the others state the lengths of evaluation. Without a
    recipe, stated lengths are for both. Only exports of this package for the original code state `evaluation`.
    """
    run, dialect = example or RunConfig(), source.dialect
    for_train = stated if dialect.states_training or example is None else {}
    for_test = stated if example is None or not dialect.states_training else {}
    if dialect.states_training:
        for_test = stated.get("evaluation", for_test)
    train = _with_stated(asdict(run.train.lengths), for_train, dialect.same_length)
    test = _with_stated(asdict(run.eval_lengths), for_test, dialect.same_length)
    for name in ("clamp_len", "attn_len"):
        if test[name] is None and train[name] is not None:  # in [eval] none means: as in training
            source.notes.append(f"Its evaluation has no {name}; here it has that of training, {train[name]}.")
    return {"train": train, "eval": {name: None if test == train else value for name, value in test.items()}}


def _with_stated(lengths: dict[str, Any], stated: Mapping[str, Any], extra: int) -> dict[str, Any]:
    """These lengths, replaced by stated ones. `same_length` means `mem_len` plus `extra` keys."""
    changed = lengths | {name: stated[name] for name in ("tgt_len", "mem_len") if name in stated}
    if "clamp_len" in stated:
        changed["clamp_len"] = stated["clamp_len"] if stated["clamp_len"] > 0 else None
    same_length = stated.get("same_length", lengths["attn_len"] == lengths["mem_len"])
    if same_length or "same_length" in stated:
        changed["attn_len"] = changed["mem_len"] + extra if same_length else None
    return changed
