"""The site builds without a warning, loads nothing from other hosts, and its pictures are what their script draws."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.outside


def script(name: str):
    """A script of docs/ as a module."""
    spec = spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.timeout(600)
def test_the_site_loads_nothing_from_other_hosts(site):
    pages = sorted(site.rglob("*.html"))
    assert {page.stem for page in pages} > {page.stem for page in (ROOT / "docs").rglob("*.md")}
    for page in pages:
        loaded = re.findall(
            r'<(?:script|img|link|iframe)\b[^>]*(?:src|href)="?(https?:[^" >]*)', page.read_text("utf-8")
        )
        assert not loaded, page


@pytest.mark.timeout(600)
def test_formulas_and_names_are_on_the_site(site):
    math = (site / "math.html").read_text("utf-8")
    assert math.count("<math") > 40 and "arithmatex" not in math
    assert "fit" in (site / "reference.html").read_text("utf-8")
    assert (site / "repository" / "experiments" / "LOG.html").is_file()


def test_every_public_name_is_in_the_reference():
    import transformer_xl

    pages = (ROOT / "docs" / "reference.md").read_text("utf-8")
    documented = set(re.findall(r"^::: transformer_xl\.(\S+)$", pages, re.MULTILINE))
    homes = {f"{home}.{name}" for name, home in transformer_xl._HOMES.items()}
    assert homes <= documented, homes - documented


@pytest.mark.parametrize("name", script("pictures").PICTURES)
def test_a_picture_is_what_its_script_draws(name):
    drawn = script("pictures").PICTURES[name]()
    assert (ROOT / "docs" / "figures" / f"{name}.svg").read_text("utf-8") == drawn, "run python docs/pictures.py"


def test_the_rooms_are_what_their_script_draws():
    def arrows(picture: str) -> str:
        return re.sub(r' stroke-width="[\d.]+"', "", picture)  # it follows the number of imports

    drawn, kept = script("rooms").picture(), (ROOT / "docs" / "rooms.svg").read_text("utf-8")
    assert arrows(kept) == arrows(drawn), "run python docs/rooms.py"


def test_the_picture_of_the_reach_agrees_with_the_formula():
    pictures = script("pictures")
    last = pictures.LAYERS, 5 * pictures.SEGMENT - 1
    first = min(position for layer, position in pictures.reached(last) if layer == 0)
    assert last[1] - first == pictures.LAYERS * pictures.MEMORY + pictures.SEGMENT - 1


@pytest.mark.parametrize(
    ("page", "link", "path"),
    [
        ("data.md", "evaluation.md", "docs/evaluation.md"),
        ("data.md", "../experiments/LOG.md", "experiments/LOG.md"),
        ("tutorials/library.md", "../reference.md", "docs/reference.md"),
        ("repository/experiments/LOG.md", "../docs/results.md", "docs/results.md"),
        ("data.md", "nowhere.md", None),
        ("data.md", "https://arxiv.org", None),
    ],
)
def test_links_lead_to_files_of_the_repository(page, link, path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("latex2mathml")
    hooks = script("hooks")
    assert hooks.linked_path(page, link) == path
    assert path is None or hooks.repository_path(hooks.site_path(path)) == path


def test_the_picture_of_memory_lengths_shows_every_score(tmp_path):
    results = [{"mem_len": size, "bpc": 2 - size / 100, "unit": "byte", "targets": 1234} for size in (16, 0, 32)]
    script("memory_length").draw({"run": "runs/my", "results": results}, 16, tmp_path / "picture.svg")
    drawn = (tmp_path / "picture.svg").read_text("utf-8")
    for words in ("2.000", "1.840", "1.680", "as in training", "bpc of 1,234 targets"):
        assert words in drawn, words
    assert drawn.index("2.000") < drawn.index("1.840") < drawn.index("1.680")
