"""What may change when a run goes on, and what must be as when it began: its text, and most settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import recipe as recipes
from ..config.problems import Problems
from ..config.settings import RunConfig
from ..data.corpus import Corpus
from ..mistake import Mistake
from ..run.checkpoint import load_config, load_vocab
from ..run.folder import Run, find_checkpoint

MAY_CHANGE = {
    *("parallel", "batch_chunk", "max_steps", "log_every", "eval_every", "eval_tokens"),
    *("save_every", "keep", "sample_every", "sample_tokens", "trackers"),
}
"""Settings of [train] that may change when a run is resumed. All settings of [eval] may change too."""


def resumed_settings(
    run: Run, overrides: Sequence[str], *, recipe: str | None, data: str | None, init: Path | None
) -> RunConfig:
    """The settings of a resumed run: its own `config.toml`, with the allowed changes of the command line.

    The rest of the command line must be as when the run began, if that is recorded. RECIPE and --data may be left out.
    --data may also name another file or folder: `check_text` compares its content.

    Raises:
        FileNotFoundError: there is no run to resume.
        Mistake: a line for each setting that cannot change.
    """
    file, facts = run.path / "config.toml", run.facts()
    asked, began = recipe and recipes.recipe_identity(recipe), facts.get("recipe", "")
    if not file.exists() and run.latest is None:
        raise FileNotFoundError(f"{run.path} holds no run to resume. Leave out --resume to start one there.")
    own = run.settings()
    config, changes = recipes.changed_settings(own, overrides)
    config = replace(config, corpus=replace(config.corpus, vocab=recipes.text_name(config.corpus.vocab)))
    chosen: Any = facts.get("chosen")
    backend = chosen.get("backend") if isinstance(chosen, dict) else None
    backend = backend.get("asked") if isinstance(backend, dict) else None  # the run may have taken another
    for name in changes:
        unused = name == "train.backend" and (own.train.backend == "auto" or config.train.backend == backend)
        if unused or recipes.is_open(config, name):  # "auto" keeps what was chosen when the run began
            config = recipes.run_of(recipes.settings_in(config) | {name: recipes.value_of(own, name)}, [])
    fixed = _fixed(run, own, config, changes)
    if data is not None and recipes.text_name(data) != own.corpus.name:
        if facts.get("corpus") and Path(data).exists():
            config = replace(config, corpus=replace(config.corpus, name=recipes.text_name(data)))
        else:
            fixed.append(f"--data is {own.corpus.name} {_advice(run)}")
    if init is not None and facts.get("init", "") not in (name_of(init), init.resolve().name):
        fixed.append(f"--init is {facts.get('init') or 'not given'} {_advice(run)}")
    if began not in ("", asked) and recipe and recipes.find_recipe(recipe).resolve() != file.resolve():
        fixed.append(f"RECIPE must be {began}, by which {run.path} began, or {file}, got {asked}.")
    fixed.refuse()
    return config


def check_resumed(run: Run, config: RunConfig, corpus: Corpus) -> None:
    """Refuse to go on with a run in which the text, or a setting that cannot change, is not as when it began. The text
    and the training may be elsewhere now."""
    check_text(run, corpus)
    own = load_config(find_checkpoint(run.path, which="last"))  # not config.toml, which someone may have edited
    elsewhere = ("corpus.name", "corpus.vocab", "train.device", "train.backend", "train.cuda_graph")
    settings = [name for name in recipes.settings_in(own) if name not in elsewhere]
    problems = _fixed(run, own, config, settings)
    if problems and _fixed(run, own, run.settings(), settings):
        problems.append(f"{run.path / 'config.toml'} was edited: restore these settings there to go on.")
    problems.refuse()


def with_own_choices(run: Run, config: RunConfig) -> RunConfig:
    """`config` with what the run chose when it began instead of "auto". Another kind of device has another backend."""
    own, choices = run.settings().train, ["device", "precision", "backend"]
    kind, _, _ = config.train.device.partition(":")
    if kind not in ("auto", own.device.partition(":")[0]):
        choices.remove("backend")
    chosen = {name: getattr(own, name) for name in choices if getattr(config.train, name) == "auto"}
    return replace(config, train=replace(config.train, **chosen))


def _fixed(run: Run, own: RunConfig, config: RunConfig, changes: Sequence[str]) -> Problems:
    """A sentence about each of these settings that differs and cannot change."""
    problems = Problems(
        f"{name} is {recipes.value_of(own, name)} {_advice(run)}"
        for name in changes
        if not name.startswith("eval.") and name.removeprefix("train.") not in MAY_CHANGE
        if recipes.value_of(config, name) != recipes.value_of(own, name)
    )
    if config.train.max_steps < run.step:
        problems.append(
            f"train.max_steps must be at least {run.step}, the step that {run.path} has reached, got "
            f"{config.train.max_steps}."
        )
    return problems


def _advice(run: Run) -> str:
    return (
        f"in {run.path}, and cannot change now. Start a new run with another --out; --init {run.path} gives these "
        "weights to a model of the same shape and unit."
    )


def check_text(run: Run, corpus: Corpus) -> None:
    """Refuse a text, or a vocabulary, that is not the one with which the run began."""
    changed, began = run.changed_splits(corpus), load_config(find_checkpoint(run.path, which="last")).corpus.name
    if changed and Path(began).name not in ("", Path(corpus.name).name):
        raise Mistake(f"--data must be the text of {run.path}, {began}, which may have been moved, got {corpus.name}.")
    if changed or corpus.vocab != load_vocab(find_checkpoint(run.path, which="last")):
        what = f"the SHA-256 of {changed} differs" if changed else "it has another vocabulary"
        raise Mistake(
            f"{corpus.name} has changed since {run.path} began: {what}. Restore it, or start a new run from these "
            f"weights with --init {run.path}."
        )


def name_of(init: Path | None) -> str:
    """The name by which a run records the run, or the checkpoint in it, that it started from. The whole path could
    reveal its owner."""
    if init is None:
        return ""
    path = init.resolve()
    run = Run.of(path).path
    return path.relative_to(run.parent).as_posix() if (run / "config.toml").exists() else path.name
