"""Every block of Python and of shell on README and on the site runs, on small data and at small sizes.

The blocks of a page run one after another in one folder. Shell commands that cannot run in a test are in
`pages.ONLY_READ`, with the reason; the parser of the command line still reads them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pages import SMALL, Page, commands_of, prepare_folder, small_recipe

import transformer_xl
from transformer_xl.commands import main as cli

sybil = pytest.importorskip("sybil")
from sybil.document import Document  # noqa: E402
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser  # noqa: E402

pytestmark = pytest.mark.outside

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory):
    """A folder with texts, and a run that was trained on them."""
    folder = tmp_path_factory.mktemp("pages")
    prepare_folder(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TXL_HOME", str(folder / "cache"))
        patch.chdir(folder)
        assert cli.main(["train", "text-small", "--data", "my/", "--out", "run", *SMALL]) == 0
    return folder


def examples_of(path: Path, page: Page) -> Document:
    """The blocks of a page that can run, in their order."""

    def shell(example) -> None:
        for words in commands_of(example.parsed):
            page.command(words)

    class Python(PythonCodeBlockParser):
        def __call__(self, document):
            for region in super().__call__(document):
                evaluate = region.evaluator

                def run(example, evaluate=evaluate):
                    page.python(example.parsed)
                    return evaluate(example)

                region.evaluator = run
                yield region

    return Document.parse(str(path), CodeBlockParser(language="sh", evaluator=shell), Python())


@pytest.mark.parametrize("path", PAGES, ids=[path.relative_to(ROOT).as_posix() for path in PAGES])
@pytest.mark.timeout(600)
def test_every_block_of_a_page_runs(path, home, tmp_path, monkeypatch, capsys):
    prepare_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, value in {"TXL_HOME": str(home / "cache"), "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(transformer_xl, "load_recipe", small_recipe)
    torch.manual_seed(0)
    page = Page(home / "run", monkeypatch)
    blocks = list(examples_of(path, page).examples())
    for example in blocks:
        example.evaluate()
    with capsys.disabled():
        print(f"\n{path.relative_to(ROOT)}: {len(blocks)} blocks, {len(page.ran)} commands ran, {len(page.read)} read")


def test_fences_name_their_language():
    """A block of the site without a language, or with an unknown one, would not be tested."""
    for path in PAGES[1:]:
        fences = [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip().startswith("```")]
        assert {fence.removeprefix("```") for fence in fences[::2]} <= {"python", "sh", "text", "toml", "slurm"}, path


@pytest.mark.parametrize(
    "line",
    [
        "rm -rf my",
        "txl eval runs/mine --mem-lenn 5",
        "torchrun --nproc-per-node 8 -m transformer_xl train enwik8-13l",
        "torchrun --nproc-per-node 8 -m transformer_xl train enwik8-12l --train.paralel fsdp",
        "txl data wikitext-2 --sauce x",
        "txl convert x --from tensorflow --two y",
    ],
)
def test_a_wrong_command_fails_also_if_it_is_only_read(line, home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((AssertionError, SystemExit)):
        Page(home / "run", monkeypatch).command(line.split())
