"""`txl`: the command line.

Only the file of the command that runs is imported. tyro writes its help and reads everything except settings,
`--section.field value`. `config.recipe` reads the settings together with the recipe, so all mistakes in both are
reported at once. No torch is imported before a command runs.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from textwrap import fill, indent
from typing import Any

from ..config import recipe as recipes
from ..mistake import Mistake, did_you_mean, printable
from ..runtime.launcher import rank_and_size
from ..runtime.terminal import Output
from . import COMMANDS, command_class

NO_MEMORY = re.compile(
    r"can't allocate memory|out of memory|size calculation overflowed|multiplication overflow|STATUS_ALLOC_FAILED"
)
"""Torch's errors, and those of CUDA's libraries, for what does not fit into memory."""
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""The variables that control how threads of GNU's OpenMP wait for each other."""
SPINS = "1000"
"""How often a waiting thread checks before it sleeps. OpenMP's default of 300,000 delays a thread that shares its core
with another process. experiments/LOG.md has the cost of each number."""
MISTAKE = 2
"""Exit status for a user's mistake; 75 is the status of a run that saved after a signal stopped it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. A user's mistake prints a sentence; a bug keeps its traceback."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    closed = sys.stdout is None
    fill_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may lack characters that a model writes
            stream.reconfigure(errors="replace")
    if not any(name in os.environ for name in WAITING):  # before torch loads OpenMP, which reads it once
        os.environ["GOMP_SPINCOUNT"] = SPINS
    with redirect_stdout(Output(sys.stdout)), redirect_stderr(Output(sys.stderr, lasting=True)):
        return status_of(arguments, closed=closed)


def status_of(arguments: list[str], *, closed: bool) -> int:
    """Run one command and return its exit status. `closed`: standard output was closed."""
    try:
        if closed and arguments[:1] != ["train"]:  # train also writes everything to log.txt
            raise Mistake("Standard output is closed. Send it to a file, or to /dev/null.")
        status = dispatch(arguments)
        sys.stdout.flush()  # a failure here is reported in a sentence, at exit it is not
        return status
    except BrokenPipeError:  # the reader, for example `head`, has closed the pipe
        return 141
    except KeyboardInterrupt as interrupt:
        complain(" ".join(["Interrupted.", *getattr(interrupt, "__notes__", [])]))
        return 130
    except Exception as error:
        sentence = users_sentence(error)
        if sentence is None:
            if name := rank_name():
                complain(f"{name}failed:")
            raise
        with suppress(OSError):
            sys.stdout.flush()
        for line in sentence.splitlines():
            complain(rank_name() + line)
        return MISTAKE


def dispatch(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        from .. import __version__

        print(f"txl {__version__}")
        return 0
    if arguments and arguments[0] not in (*COMMANDS, "-h", "--help"):
        near = did_you_mean(arguments[0], COMMANDS)
        raise Mistake(f"The command must be one of {', '.join(COMMANDS)}, got {arguments[0]!r}.{near}")
    if rank_and_size()[1] > 1 and arguments[:1] not in ([], ["train"]):
        raise Mistake(f"txl {arguments[0]} runs in one process. Start it without torchrun.")
    if own := os.environ.get("TXL_IMPORT"):
        import_own_kinds(Path(own))
    if not arguments or arguments[0].startswith("-"):
        return show_help(arguments)
    return parse(arguments[0], arguments[1:])


def show_help(arguments: Sequence[str]) -> int:
    """Print the commands. The exit status is 0 with `--help`, and that of a mistake without."""
    columns, widest = shutil.get_terminal_size().columns, max(map(len, COMMANDS)) + 2
    lines = [f"{name:{widest}}{what}" for name, what in COMMANDS.items()]
    print("usage: txl COMMAND [OPTIONS]\n\nTransformer-XL. Commands:\n")
    print(indent("\n".join(fill(line, columns - 2, subsequent_indent=" " * widest) for line in lines), "  "))
    names = f"Recipes: {', '.join(recipes.packaged_recipes())}."
    print("\n" + fill(names, columns, break_on_hyphens=False))
    print("\n`txl COMMAND --help` lists the options of a command.")
    return 0 if arguments else MISTAKE


def parse(name: str, words: list[str]) -> int:
    """Read the options of a command and run it; return the exit status."""
    import tyro
    from tyro.conf import DisallowNone, FlagCreatePairsOff

    from .shared import REGISTRY

    settings: list[str] | None = None
    if name in ("train", "convert"):
        settings, words = recipes.split_overrides(words)
    if name == "train":
        from .train import spell_out_resume

        words = spell_out_resume(words)
    try:
        config = (FlagCreatePairsOff, DisallowNone)
        options = tyro.cli(command_class(name), prog=f"txl {name}", args=words, config=config, registry=REGISTRY)
    finally:
        sys.stdout.flush()  # tyro prints the help and ends the process
    return (options.run() if settings is None else options.run(settings)) or 0


def import_own_kinds(file: Path) -> None:
    """Run the user's Python file that registers kinds of models; see `transformer_xl.register`."""
    if file.suffix != ".py" or not file.is_file():
        raise Mistake(
            f"TXL_IMPORT must name the Python file that registers your kinds of models, got {file}. Unset it."
        )
    spec: Any = spec_from_file_location("txl_import", file)
    sys.modules[spec.name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


def users_sentence(error: Exception) -> str | None:
    """The sentence for a user's mistake, or None for a bug.

    An `OSError` without `strerror` was raised by this package and is a sentence. Errors of the system have `strerror`.
    """
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return "\n".join([f"{error.filename}: {error.strerror}.", *getattr(error, "__notes__", [])])
    if isinstance(error, Mistake | FloatingPointError) or (isinstance(error, OSError) and error.strerror is None):
        return "\n".join([str(error), *getattr(error, "__notes__", []), *cache_advice(error)])
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and NO_MEMORY.search(str(error))):
        reason = f" ({str(error).splitlines()[0].rstrip('.')})" if str(error) else ""
        return f"There is not enough memory{reason}. Lower the sizes of the model, the batch or the lengths."
    return None


def cache_advice(error: Exception) -> list[str]:
    """How to write elsewhere, if the error is one of writing what is kept between commands."""
    if not isinstance(error, OSError) or error.errno is None:
        return []
    from ..data.datasets import cache_folder

    home = cache_folder()
    inside = str(error).startswith((f"{home}{os.sep}", f"{home} "))
    return [f"Or set TXL_HOME to another folder than {home}."] if inside else []


def fill_streams() -> None:
    """Replace closed standard streams by the null device. Otherwise the next file opened would get their descriptors,
    and everything printed would go to it."""
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            nowhere = io.FileIO(os.open(os.devnull, os.O_RDWR), mode, closefd=False)
            setattr(sys, name, io.TextIOWrapper(nowhere, encoding="utf-8"))


def rank_name() -> str:
    """The prefix of every line that a rank prints; "" if there is only one rank."""
    try:
        rank, size = rank_and_size()
    except ValueError:  # `dispatch` reports it
        return ""
    return f"rank {rank}: " if size > 1 else ""


def complain(sentence: str) -> None:
    """Print a sentence on standard error. Control characters are escaped, because the sentence may quote a file."""
    print("txl:", printable(sentence), file=sys.stderr)
