"""What is released: the files of the wheel and of the sdist, and the pages that state versions and commands."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STEM = f"transformer_xl-{PROJECT['version']}"


def tracked_files(*below: str) -> set[str]:
    """The files that git tracks, except those that are deleted in the work tree."""
    if shutil.which("git") is None:
        pytest.skip("only git knows which files belong to the release")
    listed = subprocess.run(["git", "ls-files", *below], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("only git knows which files belong to the release, and this is not a clone")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel made from it."""
    pytest.importorskip("build", reason="the extra `dev` has what builds a release")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.outside
def test_the_wheel_holds_the_package_and_nothing_else(dist: Path) -> None:
    with zipfile.ZipFile(dist / f"{STEM}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
    info = {name for name in names if name.startswith(f"{STEM}.dist-info/")}
    assert names - info == tracked_files("transformer_xl")
    assert {name.split("/", 1)[1] for name in info} == {
        *("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    }


@pytest.mark.outside
def test_the_sdist_holds_every_file_of_the_repository(dist: Path) -> None:
    with tarfile.open(dist / f"{STEM}.tar.gz") as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames()}
    assert tracked_files() - names == set()
    assert "PKG-INFO" in names


def test_the_citation_has_the_version_licence_and_authors_of_the_project() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
    assert citation["references"][0]["url"] == PROJECT["urls"]["Paper"]


def test_the_makefile_has_each_target_that_a_page_names() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md"):
        assert set(re.findall(r"(?:`|^)make ([a-z-]+)", (ROOT / page).read_text(), re.MULTILINE)) <= targets


def test_the_pages_about_a_release_link_to_files_that_exist() -> None:
    for page in ("SECURITY.md", "CONTRIBUTING.md"):
        links = re.findall(r"\]\(([^):#]+)\)", (ROOT / page).read_text())
        assert links and all((ROOT / link).exists() for link in links), page


def test_pins_cover_what_every_extra_of_dev_needs() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] not in ("", "#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9A-Za-z.]*", line) for line in lines)
    pins = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    extras = PROJECT["optional-dependencies"]
    needs = {re.split(r"[\[<>=;]", line)[0] for name in extras.keys() - {"wandb"} for line in extras[name]}
    assert needs - pins == {"transformer-xl"}
