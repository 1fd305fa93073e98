"""From what a source holds and states to the settings of a run, so that evaluation gives its home numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any

from transformer_xl.recipe import changed_settings, load_recipe, packaged_recipes, parse_overrides, with_model
from transformer_xl.settings import CorpusConfig, EvalConfig, RunConfig, TrainConfig

from .mapping import shape_of
from .source import Source

_OTHER_NAMES = {"n_token": "vocab_size"}
_COUNT, _LENGTH, _FLAG, _RATE = (int,), (int, NoneType), (bool,), (int, float)
_SHAPE = dict.fromkeys(
    ("vocab_size", "n_layer", "n_head", "d_head", "d_model", "d_inner", "d_embed", "div_val"), _COUNT
)
"""What arrays tell for certain; a source that states something else is damaged."""
_BELIEVED = {
    **dict.fromkeys(("tie_weight", "pre_lnorm"), _FLAG),
    **dict.fromkeys(("layer_norm_epsilon", "dropout", "dropatt", "init_std", "proj_init_std"), _RATE),
}
"""What arrays do not tell, or not for certain."""
_LENGTHS = {
    **dict.fromkeys(("tgt_len", "mem_len", "clamp_len", "ext_len", "attn_type"), _LENGTH),
    "same_length": _FLAG,
    "emb_scale": _RATE,
    "cutoffs": (list, tuple),
}
_SAME_WEIGHTS = ("vocab_size", "n_layer", "n_head", "d_head", "d_model", "d_inner", "embed_width", "div_val")


def run_settings(source: Source, overrides: Sequence[str] = ()) -> RunConfig:
    """The settings that go with a source's arrays; what was assumed for want of a statement goes to `source.notes`.

    Sizes follow from the arrays; lengths, cutoffs and rates from the source's statements, else from the packaged recipe
    whose weights have exactly this shape; `overrides` (`--section.field value ...`) stand above both.

    Raises:
        ValueError: a statement contradicts the arrays, or something needed is said nowhere.
    """
    if source.run is not None:
        return changed_settings(source.run, overrides)[0]
    problems: list[str] = []
    shape = shape_of(source)
    stated = _well_formed(source.stated, shape["vocab_size"], problems)
    problems += _contradictions(stated, shape)
    if problems:
        raise ValueError(f"{source.path} does not agree with itself: {'; '.join(problems)}. Correct what is beside it.")
    model: dict[str, Any] = {
        "layer_norm_epsilon": source.dialect.layer_norm_epsilon,
        "zero_memory": source.dialect.zero_memory,
        **shape,
        **{name: stated[name] for name in (*_BELIEVED, "cutoffs") if name in stated},
    }
    recipe, example = _recipe_like(model)
    asked = {(setting.section, setting.field) for setting in parse_overrides(overrides, [])}
    if "cutoffs" not in model and ("model", "cutoffs") not in asked:
        if example is None:
            raise ValueError(
                f"{source.path} does not say where the bands of its vocabulary of {shape['vocab_size']:,} end: give "
                "--model.cutoffs, for instance 20000,40000,200000 for WikiText-103."
            )
        model["cutoffs"] = example.model.cutoffs
    if stated.get("emb_scale", shape["d_model"] ** 0.5) != shape["d_model"] ** 0.5:
        model["embedding_scale"] = stated["emb_scale"]
    if shape["d_embed"] == shape["d_model"]:
        model["d_embed"] = None
    run = _lengths(source, stated, recipe, example)
    if source.vocab is not None:
        own = CorpusConfig(unit=source.vocab.unit, newlines=source.vocab.newlines)
        same = (run.corpus.unit, run.corpus.newlines) == (own.unit, own.newlines)
        run = run if same else replace(run, corpus=own)
    return with_model(run, model, overrides)


def _well_formed(stated: Mapping[str, Any], vocab_size: int, problems: list[str]) -> dict[str, Any]:
    """The statements that are used here, under our names; what is of the wrong type goes to `problems`."""
    known = _SHAPE | _BELIEVED | _LENGTHS
    found: dict[str, Any] = {}
    for name, value in stated.items():
        name = _OTHER_NAMES.get(name, name)
        if name not in known or (value is None and name not in _LENGTHS):
            continue
        whole = name != "cutoffs" or (isinstance(value, Sequence) and all(type(cutoff) is int for cutoff in value))
        if type(value) in known[name] and whole:
            found[name] = value
        else:
            problems.append(
                f"{name} must be {' or '.join(t.__name__ for t in known[name])}, and is {str(value)[:60]!r}"
            )
    if "cutoffs" in found:  # some programs write 0 in front and the size of the vocabulary behind
        found["cutoffs"] = tuple(cutoff for cutoff in found["cutoffs"] if 0 < cutoff < vocab_size)
    return found


def _contradictions(stated: Mapping[str, Any], shape: Mapping[str, Any]) -> Iterator[str]:
    for name in (*_SHAPE, "cutoffs"):
        if name in stated and name in shape and stated[name] != shape[name]:
            yield f"{name} is {stated[name]} by its settings and {shape[name]} by its arrays"
    if stated.get("attn_type"):
        yield f"attn_type is {stated['attn_type']}, and only attn_type 0 (Transformer-XL itself) can be converted"


def _recipe_like(model: Mapping[str, Any]) -> tuple[str, RunConfig | None]:
    """The one packaged recipe whose weights have this shape."""
    wanted = {**model, "embed_width": model["d_embed"]}
    found = []
    for name in packaged_recipes():
        config = load_recipe(name)
        sizes = all(getattr(config.model, size) == wanted[size] for size in _SAME_WEIGHTS)
        if sizes and wanted.get("cutoffs", config.model.cutoffs) == config.model.cutoffs:
            found.append((name, config))
    return found[0] if len(found) == 1 else ("", None)


def _lengths(source: Source, stated: Mapping[str, Any], recipe: str, example: RunConfig | None) -> RunConfig:
    """A run with the corpus and the lengths of training and evaluation.

    The original and NVIDIA's code state those of training, the others those of evaluation.
    """
    run = example or RunConfig()
    extra = source.dialect.same_length
    if example is not None:
        source.notes.append(
            f"Corpus, lengths and rates not stated are those of the recipe {recipe}, of the same shape."
        )
        train, test = (replace(part, **_wider(part, extra)) for part in (run.train, run.eval))
        run = replace(run, train=train, eval=test)
    if stated.get("mem_len") is None:
        if example is None:
            source.notes.append("It does not state its lengths: set --train.tgt-len, --train.mem-len and the like.")
        return run
    mem_len, clamp = stated["mem_len"], stated.get("clamp_len") or -1
    window = mem_len + extra if stated.get("same_length") else None
    lengths = {
        "tgt_len": stated.get("tgt_len") or run.eval.tgt_len or run.train.tgt_len,
        "mem_len": mem_len,
        "clamp_len": clamp if clamp > 0 else None,
        "attn_len": window or None,
    }
    if stated.get("ext_len"):
        source.notes.append(f"ext_len was {stated['ext_len']}: here no segment is extended, memory does that.")
    training = source.program in ("original", "nvidia")
    evaluated = run.eval if training and example is not None else EvalConfig()
    return replace(run, train=replace(run.train, **lengths), eval=evaluated)


def _wider(part: TrainConfig | EvalConfig, extra: int) -> dict[str, Any]:
    """The window of a recipe, which is the original's `same_length`, as the source's program means it."""
    return {} if part.attn_len is None or part.attn_len != part.mem_len else {"attn_len": part.attn_len + extra}
