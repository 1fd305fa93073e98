"""From what a source holds and states to the settings of a run, so that evaluation gives its home numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ..config.recipe import (
    Setting,
    assembled,
    changed_settings,
    load_recipe,
    packaged_recipes,
    parse_overrides,
    settings_in,
)
from ..config.settings import CorpusConfig, RunConfig
from ..mistake import Mistake
from .mapping import shape_of
from .source import Source

_OTHER_NAMES = {"n_token": "vocab_size"}
_COUNT, _FLAG, _RATE, _LIST = (int,), (bool,), (int, float), (list, tuple)
_SHAPE = dict.fromkeys(
    ("vocab_size", "n_layer", "n_head", "d_head", "d_model", "d_inner", "d_embed", "div_val"), _COUNT
)
"""What arrays tell for certain; a source that states something else is damaged."""
_RATES = dict.fromkeys(("dropout", "dropatt", "init_std", "proj_init_std"), _RATE)
_BELIEVED = (
    dict.fromkeys(("tie_weight", "pre_lnorm"), _FLAG) | {"layer_norm_epsilon": _RATE, "tie_projs": _LIST} | _RATES
)
"""What arrays do not tell, or not for certain."""
_LENGTHS = dict.fromkeys(("tgt_len", "mem_len", "clamp_len"), _COUNT) | {"same_length": _FLAG}
_OTHERS = {
    **dict.fromkeys(("ext_len", "attn_type"), _COUNT),
    **dict.fromkeys(("untie_r", "proj_share_all_but_first"), _FLAG),
    "emb_scale": _RATE,
    "cutoffs": _LIST,
    "evaluation": (dict,),
}
_KNOWN = _SHAPE | _BELIEVED | _LENGTHS | _OTHERS
_ITEMS = {"cutoffs": int, "tie_projs": bool}
_WANTED: dict[Any, str] = {
    _COUNT: "a whole number",
    _FLAG: "true or false",
    _RATE: "a number",
    "cutoffs": "a list of whole numbers",
    "tie_projs": "a list of true and false",
    "evaluation": "a table of lengths",
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
    shape = shape_of(source)
    stated = _statements(source, shape)
    recipe, example = _recipe_like(shape | stated)
    if example is not None:
        source.notes.append(
            f"What is not stated of corpus, lengths and rates is as in the recipe {recipe}, of this shape."
        )
    model = _model(source, stated, shape, example)
    asked = {(setting.section, setting.field) for setting in parse_overrides(overrides, [])}
    if "cutoffs" not in model and ("model", "cutoffs") not in asked:
        raise Mistake(
            f"{source.path} does not say where the bands of its vocabulary of {shape['vocab_size']:,} end: give "
            "--model.cutoffs, for instance 20000,40000,200000 for WikiText-103."
        )
    base = example or RunConfig()
    unsaid = [
        name for name in (*_LENGTHS, *([] if source.program == "tensorflow" else ["pre_lnorm"])) if name not in stated
    ]
    if unsaid and example is None:
        source.notes.append(f"Nothing states {', '.join(unsaid)}: taken are the defaults of this package.")
    if source.vocab is not None:
        own = CorpusConfig(unit=source.vocab.unit, newlines=source.vocab.newlines)
        same = (base.corpus.unit, base.corpus.newlines) == (own.unit, own.newlines)
        base = base if same else replace(base, corpus=own)
    facts = [
        Setting(section, name, value, f"{section}.{name}", _told(source, name))
        for section, part in {"model": model, **_lengths(source, stated, example)}.items()
        for name, value in part.items()
    ]
    kept = [setting for setting in settings_in(base) if setting.section != "model"]
    return assembled([*kept, *facts], overrides)


def _model(
    source: Source, stated: Mapping[str, Any], shape: Mapping[str, Any], example: RunConfig | None
) -> dict[str, Any]:
    """The settings of the model; without `cutoffs` where nothing tells them."""
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
    """What the source states, well-formed and in our form.

    Raises:
        ValueError: all that is of a wrong type, or contradicts the arrays.
    """
    problems: list[str] = []
    stated: dict[str, Any] = {}
    for theirs, value in source.stated.items():
        name = _OTHER_NAMES.get(theirs, theirs)
        if name in _KNOWN and _fits(name, value):
            stated[name] = value
        elif name in _KNOWN:
            wanted = _WANTED.get(name) or _WANTED[_KNOWN[name]]
            shown = repr(value[:60]) if isinstance(value, str) else f"a {type(value).__name__}"
            problems.append(f"{theirs} in {source.told_in[theirs]} must be {wanted}, and is {shown}")
    bands = shape["bands"]
    if "cutoffs" in stated:  # some programs write 0 in front and the size of the vocabulary behind
        stated["cutoffs"] = tuple(cutoff for cutoff in stated["cutoffs"] if 0 < cutoff < shape["vocab_size"])
    if "tie_projs" in stated:
        stated["tie_projs"] = tuple(stated["tie_projs"])
    elif stated.get("proj_share_all_but_first") and bands > 1:
        stated["tie_projs"] = (False, *[True] * (bands - 1))
    problems += _contradictions(source, stated, shape)
    if problems:
        raise Mistake(f"{source.path} does not agree with itself: {'; '.join(problems)}.")
    return stated


def _fits(name: str, value: Any) -> bool:
    """Whether a statement is of its type, and what stands in it too."""
    if name == "evaluation":
        return isinstance(value, dict) and all(
            key in (*_LENGTHS, "ext_len") and _fits(key, v) for key, v in value.items()
        )
    items = value if name in _ITEMS and isinstance(value, Sequence) else ()
    return type(value) in _KNOWN[name] and all(type(item) is _ITEMS[name] for item in items)


def _told(source: Source, name: str) -> str:
    """Where a setting comes from, for a sentence."""
    name = "same_length" if name == "attn_len" else name
    return f" in {source.told_in[name]}" if name in source.told_in else ""


def _contradictions(source: Source, stated: Mapping[str, Any], shape: Mapping[str, Any]) -> Iterator[str]:
    if stated.get("attn_type"):
        yield f"attn_type is {stated['attn_type']}{_told(source, 'attn_type')} and 0 by its arrays"
    certain = (*_SHAPE, "cutoffs", *(["untie_r"] if shape["n_layer"] > 1 else []))
    for name in certain:
        if name in stated and name in shape and stated[name] != shape[name]:
            yield f"{name} is {stated[name]}{_told(source, name)} and {shape[name]} by its arrays"
    bands = shape["bands"]
    if len(stated.get("cutoffs", ())) not in (0, bands - 1):
        yield f"cutoffs{_told(source, 'cutoffs')} must part its {bands} bands, and are {stated['cutoffs']}"
    if "tie_projs" in shape and len(stated.get("tie_projs", shape["tie_projs"])) != bands:
        yield f"tie_projs{_told(source, 'tie_projs')} must hold a value for each of {bands} bands"


def _recipe_like(model: Mapping[str, Any]) -> tuple[str, RunConfig | None]:
    """The one packaged recipe whose weights have this shape."""
    wanted = {**model, "embed_width": model["d_embed"]}
    found = []
    for name in packaged_recipes():
        config = load_recipe(name)
        sizes = all(getattr(config.model, size) == wanted[size] for size in _SAME_WEIGHTS)
        if (
            sizes
            and config.model.kind == "transformer-xl"
            and wanted.get("cutoffs", config.model.cutoffs) == config.model.cutoffs
        ):
            found.append((name, config))
    return found[0] if len(found) == 1 else ("", None)


def _lengths(source: Source, stated: Mapping[str, Any], example: RunConfig | None) -> dict[str, dict[str, Any]]:
    """The lengths of training and of evaluation, each whole: those stated, on those of the recipe of the same shape.

    The original and NVIDIA's code state those of training, the others those of evaluation. Without a recipe, training
    and evaluation have the same.
    """
    run = example or RunConfig()
    extra = source.dialect.same_length
    train, test = (_wider(asdict(lengths), extra) for lengths in (run.train.lengths, run.eval_lengths))
    if stated.get("ext_len"):
        source.notes.append(f"ext_len was {stated['ext_len']}: here no segment is extended, memory does that.")
    if source.dialect.states_training or example is None:
        train = _with_stated(train, stated, extra)
    if not source.dialect.states_training:
        test = _with_stated(test, stated, extra)
    elif "evaluation" in stated:  # in what we wrote for the original's code
        test = _with_stated(test, stated["evaluation"], extra)
    elif example is None:
        test = train
    for name in ("clamp_len", "attn_len"):
        if test[name] is None and train[name] is not None:  # in [eval] none means: as in training
            source.notes.append(f"Evaluation has no {name} at home; here it has that of training, {train[name]}.")
    return {"train": train, "eval": {name: None if test == train else value for name, value in test.items()}}


def _wider(lengths: dict[str, Any], extra: int) -> dict[str, Any]:
    """The lengths of a recipe, whose window is the original's `same_length`, as the source's program means that."""
    same_length = lengths["attn_len"] is not None and lengths["attn_len"] == lengths["mem_len"]
    return lengths | ({"attn_len": lengths["mem_len"] + extra} if same_length else {})


def _with_stated(lengths: dict[str, Any], stated: Mapping[str, Any], extra: int) -> dict[str, Any]:
    """These lengths, each one that is stated in the place of what it was."""
    found = lengths | {name: stated[name] for name in ("tgt_len", "mem_len") if name in stated}
    if "clamp_len" in stated:
        found["clamp_len"] = stated["clamp_len"] if stated["clamp_len"] > 0 else None
    same_length = stated.get("same_length", lengths["attn_len"] == lengths["mem_len"] + extra)
    if same_length or "same_length" in stated:
        found["attn_len"] = found["mem_len"] + extra if same_length else None
    return found
