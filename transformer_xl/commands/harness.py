"""`txl harness`: score a model on tasks of lm-evaluation-harness, and print its table of results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from ..mistake import Mistake
from .shared import Folder, Precision, RunFolder, Size


@dataclass(frozen=True)
class Harness:
    """Score a model on tasks of lm-evaluation-harness. No document is cut."""

    folder: RunFolder
    tasks: Annotated[tuple[str, ...], arg(metavar="NAME,...")] = ()
    """Names of tasks or groups of tasks. `lm_eval ls tasks` lists them."""
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
    device: str = "auto"
    precision: Precision = "fp32"
    json: bool = False
    """Print the harness's results as one JSON object."""

    def run(self) -> None:
        """Score the model on each task."""
        from ..interop import local
        from ..interop.harness import harness_model, require_harness
        from ..run.trained import TrainedRun

        trained = TrainedRun(local(self.folder), self.device, self.precision)
        problems = trained.problems
        names = [name for word in self.tasks for name in word.split(",") if name]
        if not names:
            problems.append("--tasks must name at least one task, for example lambada_openai.")
        problems.bound(self, "limit", least=1)
        problems.bound(self, "num_fewshot", least=0)
        lengths = trained.lengths(self)
        problems.attempt(require_harness)
        problems.refuse()
        manager = _task_manager(names, self.include)
        model = harness_model(trained.load(), lengths[0], precision=trained.precision)
        how = {"num_fewshot": self.num_fewshot, "limit": self.limit, "log_samples": False}
        results = import_module("lm_eval").simple_evaluate(model=model, tasks=names, task_manager=manager, **how)
        table = import_module("lm_eval.utils").make_table
        print(json.dumps(results["results"], default=str) if self.json else table(results))


def _task_manager(names: Sequence[str], include: Path | None) -> Any:
    """The harness's index of tasks, which must have all `names`."""
    if include is not None and not include.is_dir():
        raise FileNotFoundError(f"There is no folder {include} (--include). Name one with YAML files of tasks.")
    manager = import_module("lm_eval.tasks").TaskManager(include_path=None if include is None else str(include))
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise Mistake(f"--tasks must name tasks that `lm_eval ls tasks` lists, got {', '.join(unknown)}.")
    return manager
