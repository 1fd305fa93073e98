"""`txl train`: train with a recipe, and write a run folder with everything needed to repeat the run.

Under torchrun every rank runs this; only rank 0 writes and prints.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import FlagConversionOff, Positional, arg

from ..config import recipe as recipes
from ..config.settings import RunConfig
from ..mistake import Mistake
from ..runtime.launcher import rank_and_size
from ..runtime.terminal import Output

if TYPE_CHECKING:
    from ..run.folder import Run
    from ..train.start import Origin


@dataclass(frozen=True)
class Train:
    """Train with a recipe, then score the best checkpoint. Any setting can be given as --section.field value."""

    recipe: Annotated[Positional[str | None], arg(metavar="RECIPE")] = None
    """The name of a packaged recipe (`txl recipes` lists them), or a TOML file. Without it, one is chosen for --data:
    by its name for a published corpus, otherwise by corpus.unit and the size of the text."""
    data: Annotated[str | None, arg(metavar="PATH")] = None
    """Train on this text file or folder, not the recipe's corpus. Line ends are kept, and the vocabulary is made from
    the text. PATH may also be JSON lines (.jsonl), each a document, or token ids (.npy, .npz, .bin)."""
    out: Annotated[Path | None, arg(metavar="RUN")] = None
    """The run folder; by default runs/RECIPE, or runs/ and the name of --data."""
    init: Annotated[Path | None, arg(metavar="RUN")] = None
    """Start from the weights of this run, with its shape and vocabulary."""
    resume: Annotated[Literal["no", "yes", "auto"], arg(metavar="[auto]")] = "no"
    """Continue the run in --out from its last checkpoint, with its own config.toml. --resume auto: continue the run
    if it saved a checkpoint; otherwise start it."""
    report: bool = True
    """Whether to write the run's page at the end."""
    print_config: bool = False
    """Print the settings as TOML and exit."""
    settings: Annotated[RunConfig, arg(name=""), FlagConversionOff] = field(default_factory=RunConfig)
    """Only for the help: `run` gets the settings as words."""

    def run(self, overrides: Sequence[str]) -> int:
        """Train in the folder, then score the best checkpoint and write the page. Returns the exit status."""
        folder = self.out or default_run(self.recipe, self.data)
        saved = any(folder.glob("checkpoints/[!.]*"))  # sound or damaged
        resume = self.resume == "yes" or (saved and self.resume == "auto")
        if saved and not resume:
            from ..run.folder import Run

            resume = Run(folder).began_here()  # torchrun starts a process again to replace processes that failed
        recipe, why, first = self.recipe or "", "", rank_and_size()[0] == 0
        if resume:
            from ..run.folder import Run
            from ..train.resuming import resumed_settings

            given = {"recipe": self.recipe, "data": self.data, "init": self.init}
            config = resumed_settings(Run(folder), overrides, **given)
        else:
            defaults: Sequence[str] = ()
            default_run(self.recipe, self.data)  # refuses neither of them, also with --out
            if self.recipe is None:
                from ..data.choose import choose_recipe

                init = None
                if self.init is not None:
                    from ..interop.hub import local
                    from ..run.checkpoint import find_checkpoint, load_config, load_vocab

                    source = find_checkpoint(local(self.init))
                    init = load_vocab(source), load_config(source).corpus
                recipe, defaults, why = choose_recipe(self.data or "", overrides, init)
            note = None if first else recipes.unsaid
            config = recipes.load_recipe(recipe, [*defaults, *overrides], data=self.data, note=note)
        if self.print_config:
            if first:
                print(f"# {why}\n" if why else "", recipes.write_toml(config), sep="", end="")
            return 0

        from ..interop.hub import local
        from ..run.folder import Run
        from ..train.start import Origin

        origin = Origin()
        if why and self.init is not None:
            why += f" Only its training is used: the model and its vocabulary are those of {self.init}."
        if not resume:
            init = local(self.init) if self.init else None
            given = recipes.chosen_settings(self.recipe, overrides, self.data)
            origin = Origin(recipes.recipe_identity(recipe), init, self.init, given, why)
        return train(config, Run(folder), origin, resume=resume, afresh=self.resume == "auto", page=self.report)


def train(config: RunConfig, run: Run, origin: Origin, *, resume: bool, afresh: bool, page: bool) -> int:
    """Train with `config`, then score the best checkpoint. Returns the exit status.

    `resume` continues from the last checkpoint. `afresh` allows the folder of a run that saved nothing. `page` writes
    the run's page from what is there. Mistakes are found before anything is written.
    """
    from ..evaluation.score import show_results
    from ..report.page import write_page
    from ..runtime.device import prepare_process
    from ..runtime.ranks import join_ranks
    from ..train.agreement import check_alike
    from ..train.start import prepare, score_best, train_and_save
    from ..train.trackers import Trackers, open_trackers

    prepare_process()
    with join_ranks(config.train.device) as ranks, ExitStack() as stack:
        stack.enter_context(redirect_stdout(Output(sys.stdout, lasting=True)))
        trackers = Trackers()
        if ranks.first:
            stack.enter_context(run.claimed(resume=resume, afresh=afresh))
        else:
            ranks.wait_for_first()  # until it has prepared the corpus
        start = prepare(config, run, origin, ranks, resume=resume)
        if ranks.first:
            ranks.wait_for_first()
        check_alike(start.config, start.corpus, run, ranks)  # a mistake of another rank is found here, too
        if ranks.first:
            trackers = stack.enter_context(open_trackers(run, start.config))
        status = train_and_save(start, run, ranks, resume=resume, trackers=trackers)
        if status == 0:
            result = score_best(run, start, trackers, ranks)
            if ranks.first:
                show_results(start.corpus.split(start.config.eval.split), [result])
            if ranks.first and page:
                report = f"txl report {quote(str(run.path))}"
                try:
                    write_page([run.path])
                except OSError as error:
                    error.add_note(f"The run is done and saved. {report} writes its page.")
                    raise
                print(f"{report} adds what takes a minute: memory lengths and a coloured text.")
    return status


def spell_out_resume(words: Sequence[str]) -> list[str]:
    """Replace `--resume` without a value by `--resume=yes`; otherwise the parser would take RECIPE as its value."""
    pairs = zip_longest(words, words[1:])
    return ["--resume=yes" if word == "--resume" and following != "auto" else word for word, following in pairs]


def default_run(recipe: str | None, data: str | None) -> Path:
    """runs/ and the recipe's name; for the config.toml of a run, the name of that run; without a recipe, the text's."""
    if recipe is None and data is None:
        raise Mistake(
            "RECIPE or --data must be given, got neither. `txl recipes` lists the recipes; `txl train --data PATH` "
            "chooses one for a text."
        )
    if recipe is None:
        text = Path(data or "").resolve()
        return Path("runs") / (text.name if text.is_dir() else text.stem)
    path = Path(recipe)
    return Path("runs") / (path.resolve().parent.name if path.name == "config.toml" else path.stem)
