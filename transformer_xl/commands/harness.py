"""`txl harness`: score a model on tasks of lm-evaluation-harness, and print the results."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from tyro.conf import arg

from ..config.settings import Lengths
from ..mistake import Mistake
from ..runtime.files import writable, write_whole
from ..runtime.terminal import show_table
from .shared import Folder, Precision, RunFolder, Size

if TYPE_CHECKING:
    from ..run import LoadedModel
    from ..run.trained import TrainedRun


@dataclass(frozen=True)
class Harness:
    """Score a model on tasks of lm-evaluation-harness.

    txl_ptb and txl_wikitext2 are made from corpora that `txl data` prepared; they need no network."""

    folder: RunFolder
    tasks: Annotated[tuple[str, ...], arg(metavar="NAME,...")] = ()
    """Names of tasks or groups of tasks."""
    include: Folder = None
    """A folder with more tasks, as YAML files."""
    limit: Size = None
    """Use only the first N documents of each task."""
    num_fewshot: Size = None
    """Number of solved examples before each question; by default the task's."""
    tgt_len: Size = None
    """Tokens per forward pass. All lengths default to the run's."""
    mem_len: Size = None
    """Tokens of memory within a document. It is empty at the start of each document."""
    batch_tokens: Annotated[int, arg(metavar="N")] = 8192
    """Number of positions in a forward pass, over all rows."""
    device: str = "auto"
    precision: Precision = "fp32"
    output: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write everything that the harness reports to a JSON file."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> None:
        """Score the model on each task, and print a row for each metric. No task's text is cut."""
        from ..interop import local
        from ..interop.harness import harness_model, require_harness
        from ..run.trained import TrainedRun

        trained = TrainedRun(local(self.folder), self.device, self.precision)
        problems, output = trained.problems, self.output
        names = list(dict.fromkeys(name for word in self.tasks for name in word.split(",") if name))
        if not names:
            problems.append("--tasks must name at least one task, for example txl_wikitext2.")
        for name in ("limit", "batch_tokens"):
            problems.bound(self, name, least=1)
        problems.bound(self, "num_fewshot", least=0)
        if output is not None:
            problems.attempt(lambda: writable(output, "--output"))
        lengths = trained.lengths(self)
        problems.attempt(require_harness)
        problems.refuse()
        if not sys.stderr.isatty():
            os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        manager = task_manager(names, self.include)
        loaded = trained.load()
        check_vocabulary(names, loaded)
        model = harness_model(loaded, lengths[0], precision=trained.precision, batch_tokens=self.batch_tokens)
        how = {"num_fewshot": self.num_fewshot, "limit": self.limit, "log_samples": False}
        results = import_module("lm_eval").simple_evaluate(model=model, tasks=names, task_manager=manager, **how)
        if output is not None:
            write_whole(output, json.dumps(results, indent=1, default=str) + "\n")
        _show(list(figures_of(results)), trained, lengths[0], self)


class Figure(NamedTuple):
    """One result of one task."""

    task: str
    metric: str
    value: float
    stderr: float | None
    documents: int | None


def task_manager(names: Sequence[str], include: Path | None) -> Any:
    """The harness's index of tasks. Our tasks among `names` are written first.

    Raises:
        Mistake: a name is of no task.
        FileNotFoundError: the corpus of a task is not prepared, or there is no folder `include`.
    """
    from ..interop.harness_tasks import TASKS, corpus_of, write_task

    if include is not None and not include.is_dir():
        raise FileNotFoundError(f"There is no folder {include} (--include). Name one with YAML files of tasks.")
    folders = [str(write_task(name, corpus_of(name))) for name in names if name in TASKS]
    folders += [] if include is None else [str(include)]
    index = import_module("lm_eval.tasks").TaskManager
    manager = index(include_path=folders, include_defaults=False)
    if set(names) <= set(manager.all_subtasks):
        return manager
    manager = index(include_path=folders)  # reads thousands of files
    for name in names:
        if name not in manager.all_tasks:
            near = get_close_matches(name, [*TASKS, *manager.all_tasks], n=1)
            question = "".join(f" Did you mean {each}?" for each in near)
            raise Mistake(
                f"--tasks must name {', '.join(TASKS)} or tasks of lm-evaluation-harness, got {name!r}.{question}"
            )
    return manager


def check_vocabulary(names: Sequence[str], loaded: LoadedModel) -> None:
    """Refuse one of our tasks if its corpus has other tokens than the model."""
    from ..interop.harness_tasks import TASKS, corpus_of

    for name in names:
        if name in TASKS:
            corpus_of(name).in_vocabulary(loaded.vocab)


def figures_of(results: dict[str, Any]) -> Iterator[Figure]:
    """The figures in the harness's results. It names them METRIC,FILTER and METRIC_stderr,FILTER."""
    for task, values in {**results["results"], **results.get("groups", {})}.items():
        documents = results.get("n-samples", {}).get(task, {}).get("effective")
        for key, value in values.items():
            metric, _, filter = key.partition(",")
            if not filter or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{metric}_stderr,{filter}")
            label = metric if filter == "none" else f"{metric} ({filter})"
            yield Figure(task, label, value, stderr if isinstance(stderr, float) else None, documents)


def _show(figures: Sequence[Figure], trained: TrainedRun, lengths: Lengths, options: Harness) -> None:
    from ..evaluation.splits import refuse_infinite

    if options.json:
        facts = {"run": str(trained.path), "trained_on": trained.config.corpus.name, "precision": trained.precision}
        facts |= {"tgt_len": lengths.tgt_len, "mem_len": lengths.mem_len, "limit": options.limit}
        rows = [each._asdict() | {"value": each.value if math.isfinite(each.value) else None} for each in figures]
        print(json.dumps(facts | {"results": rows}))
    else:
        part = "" if options.limit is None else f"; only the first {options.limit:,} documents of each task"
        title = f"{trained.path}, tgt_len {lengths.tgt_len:,}, mem_len {lengths.mem_len:,}{part}"
        rows = [[task, metric, *(_text(each) for each in numbers)] for task, metric, *numbers in figures]
        show_table(title, ["task", "metric", "value", "stderr", "documents"], rows)
    advice = "results are not finite: the weights diverged. Use another checkpoint."
    refuse_infinite([each.value for each in figures], advice)


def _text(number: float | None) -> str:
    return "-" if number is None else f"{number:,}" if isinstance(number, int) else f"{number:.4f}"
