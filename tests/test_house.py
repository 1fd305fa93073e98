"""The structure of the package: floors import downwards only, the start imports no torch, the pages are correct."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from small_models import VARIANTS, small_model

import transformer_xl
from transformer_xl.config.settings import RunConfig
from transformer_xl.data.vocab import Vocab
from transformer_xl.run.checkpoint import save_checkpoint

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "transformer_xl"

FLOORS = {
    name: int(number)
    for number, name in re.findall(r"^(\d) (\w+)/", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
}
"""The floor of each room, as CONTRIBUTING.md lists them."""
ROOF = {"__init__", "__main__", "hf"}
"""Public names, which may come from any floor."""
GROUND = {"mistake"}
"""What every floor stands on; it imports nothing of the package."""
FILES = sorted(path for path in PACKAGE.rglob("*.py"))


def room(module: tuple[str, ...]) -> str:
    """The file or folder, directly in the package, that a module belongs to: ("data", "vocab") is in data."""
    return module[0] if module else "__init__"


def floor(name: str) -> int | None:
    return -1 if name in GROUND else FLOORS.get(name)


def imports(source: str, module: tuple[str, ...], *, is_package: bool) -> Iterator[tuple[str, ...]]:
    """What a file of the package imports from the package, wherever in the file, absolute or relative.

    `from package import name` may import a module or a name of a module. Both belong to the same room, except for the
    public names of the package itself, whose modules are in `_HOMES`.
    """
    here = module if is_package else module[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            if node.level:
                base = ["transformer_xl", *here[: len(here) - node.level + 1], *base]
            names = [[*base, alias.name] for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            names = [str(arg.value).split(".") for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        else:
            continue
        for name in names:
            if name[0] == "transformer_xl":
                first = name[1] if len(name) > 1 else "__version__"
                first = (
                    "__init__" if first == "__version__" else transformer_xl._HOMES.get(first, first).partition(".")[0]
                )
                yield (first, *name[2:])


def breaches(source: str, path: str) -> list[str]:
    """The reasons why imports of a file at that path of the package are forbidden; empty if all are allowed."""
    module = tuple(path.removesuffix(".py").split("/"))
    is_package = module[-1] == "__init__"
    module = module[:-1] if is_package else module
    own = room(module)
    if own in ROOF:
        return []
    if floor(own) is None:
        return [f"{path} has no floor: give its room a line in CONTRIBUTING.md"]
    climbs = []
    for target in imports(source, module, is_package=is_package):
        there = room(target)
        if there == own or there == "__init__" or (floor(there) is not None and floor(there) < floor(own)):  # type: ignore[operator]
            continue
        climbs.append(f"{path} (floor {floor(own)}) imports {there} (floor {floor(there)})")
    return climbs


def test_files_import_lower_floors_only():
    assert FLOORS.keys() == {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    found = [problem for path in FILES for problem in breaches(path.read_text(), path.relative_to(PACKAGE).as_posix())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("config/settings.py", "import transformer_xl.model"),
        ("config/settings.py", "from .. import model"),
        ("config/settings.py", "from ..model.transformer_xl import TransformerXL"),
        ("config/settings.py", "from transformer_xl import model"),
        ("config/settings.py", "from transformer_xl import TransformerXL"),
        ("config/settings.py", "def f():\n    from ..data import vocab"),
        ("config/settings.py", "import importlib\nimportlib.import_module('transformer_xl.model')"),
        ("runtime/files.py", "from ..config.settings import Lengths"),
        ("data/__init__.py", "from ..model import TransformerXL"),
        ("data/deep/er.py", "from ...model import TransformerXL"),
        ("run/checkpoint.py", "from ..nowhere import thing"),
        ("mystery.py", ""),
    ],
)
def test_an_upward_import_or_a_file_without_a_floor_is_found(path, source):
    assert breaches(source, path)


def test_public_names_resolve():
    for name in transformer_xl.__all__:
        assert getattr(transformer_xl, name) is not None
        assert name in dir(transformer_xl)
    assert transformer_xl.TransformerXL.__module__ == "transformer_xl.model.transformer_xl"
    assert transformer_xl.__version__ == version("transformer-xl")
    with pytest.raises(AttributeError, match="no attribute 'TransformerXXL'"):
        _ = transformer_xl.TransformerXXL  # type: ignore[attr-defined]


def heavy_imports(code: str) -> str:
    """Which of the heavy packages a fresh interpreter has loaded after `code`."""
    heavy = {"torch", "torch._dynamo", "numpy", "safetensors"}
    report = f"import sys; print('loaded:', *sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.rsplit("loaded:", 1)[1].strip()


def test_importing_the_package_imports_no_torch():
    assert heavy_imports("import transformer_xl; transformer_xl.__version__") == ""
    assert heavy_imports("from transformer_xl import Lengths, TransformerXLConfig") == ""
    assert "torch" in heavy_imports("from transformer_xl import Memory")


def test_a_model_is_loaded_and_writes_without_the_compiler(tmp_path):
    """To import torch._dynamo takes as long as torch."""
    model = small_model(dtype=torch.float32, **VARIANTS["n-grams"])
    vocab = Vocab("char", tuple(map(chr, range(97, 97 + len(model.softmax.bias)))))
    save_checkpoint(tmp_path / "model", model=model, vocab=vocab, config=RunConfig(model=model.config))
    code = (
        f"from transformer_xl import load_model; load_model({str(tmp_path / 'model')!r}).generate('ab', max_tokens=2)"
    )
    assert heavy_imports(code) == "numpy safetensors torch"


def test_the_op_finds_the_echo(capsys):
    example = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "op.md").read_text(), re.DOTALL)[1]  # type: ignore[index]
    exec(compile(example, "op.md", "exec"), {})
    assert capsys.readouterr().out == "the wall is 12 samples away; error 0.0000\n"


def test_the_equations_page_names_code_that_exists():
    text = (ROOT / "docs" / "math.md").read_text()
    named = re.findall(r"`([\w/]+\.py): ([\w.]+)`", text)
    assert len(named) > 20
    for file, name in named:
        module = import_module("transformer_xl." + file.removesuffix(".py").replace("/", "."))
        assert attrgetter(name)(module) and getattr(module, name.split(".")[0]).__module__ == module.__name__, name


def test_examples_use_no_name_that_is_missing():
    """The house's rules of ruff leave F821 out, because it misreads shapes of jaxtyping; examples have none."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", str(ROOT / "examples")]
    assert subprocess.run(command).returncode == 0


def test_nothing_asks_pip_for_this_package_by_name():
    """It is not published, so `pip install transformer-xl[...]` fails; from a clone `-e ".[...]"` works."""
    pages = [*(ROOT / "transformer_xl").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    assert [str(page) for page in pages if "transformer-xl[" in page.read_text(encoding="utf-8")] == []
