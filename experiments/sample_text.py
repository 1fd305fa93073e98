"""Draw random prose of this repository, for readers who mark the sentences that are hard to read.

    python -m experiments.sample_text --seed 0 > sample.txt
    python -m experiments.sample_text --seed 0 --checkout OTHER > before.txt

40 docstrings of the package, 40 help texts of options (the docstrings of fields of the options and settings), and 10
pages, each a section of README, CHANGELOG or docs of at most 60 lines.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

PACKAGE = "transformer_xl"
LONGEST = 60


def docstrings(root: Path) -> Iterator[str]:
    for path in sorted((root / PACKAGE).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                signature = ""
                if isinstance(node, ast.FunctionDef):
                    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
                    signature = f"def {node.name}({ast.unparse(node.args)}){returns}\n"
                elif isinstance(node, ast.ClassDef):
                    signature = f"class {node.name}\n"
                yield f"{signature or f'module {path.stem}' + chr(10)}{text}"


def help_texts(root: Path) -> Iterator[str]:
    for path in sorted((root / PACKAGE).rglob("*.py")):
        if "options" not in path.parts and path.stem != "settings":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            body = node.body if isinstance(node, ast.ClassDef) else []
            for field, after in pairwise(body):
                if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                    assert isinstance(field.target, ast.Name) and isinstance(after.value, ast.Constant)
                    yield f"--{field.target.id.replace('_', '-')}: {' '.join(str(after.value.value).split())}"


def pages(root: Path) -> Iterator[str]:
    for path in [root / "README.md", root / "CHANGELOG.md", *sorted((root / "docs").glob("*.md"))]:
        for section in re.split(r"\n(?=#+ )", path.read_text()):
            if len(section.splitlines()) > 5:
                yield f"[{path.name}]\n" + "\n".join(section.splitlines()[:LONGEST])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[1])
    options = parser.parse_args()
    draw = random.Random(options.seed)
    for kind, texts, count in (("D", docstrings, 40), ("H", help_texts, 40), ("P", pages, 10)):
        for number, text in enumerate(draw.sample(list(texts(options.checkout)), count), start=1):
            print(f"=== {kind}{number}\n{text}\n")


if __name__ == "__main__":
    main()
