"""`txl score`: the log-probability, perplexity and bits of each line of a file."""

from __future__ import annotations

import json
import sys
from codecs import BOM_UTF8
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from .shared import Precision, RunFolder, Size, open_run


@dataclass(frozen=True)
class Score:
    """Print the log-probability (nats), perplexity and bits of each line of a file, separated by tabs."""

    folder: RunFolder
    file: Annotated[Positional[str], arg(metavar="FILE|-")]
    """A text file, which may be compressed (.gz, .xz, .bz2), or - for standard input."""
    tgt_len: Size = None
    mem_len: Size = None
    """Tokens of memory within a line."""
    device: str = "auto"
    precision: Precision = "fp32"
    json: bool = False
    """Print one JSON object per line."""

    def run(self) -> None:
        from ..data.reading import read_text
        from ..data.vocab import text_of
        from ..evaluation.lines import score_lines
        from ..evaluation.score import bits, report_infinite
        from ..run.metrics import finite

        trained = open_run(self.folder, self.device, self.precision)
        found = trained.lengths(self)
        trained.problems.refuse()
        text = read_text(self.file)
        loaded = trained.load()
        lines = (text if loaded.vocab.unit == "byte" else text.removeprefix(BOM_UTF8)).split(b"\n")
        if not lines[-1]:  # nothing follows the last line end, or the file is empty
            lines.pop()
        texts = (text_of(line, f"{self.file}, line {number:,},") for number, line in enumerate(lines, start=1))
        given = lines if loaded.vocab.unit == "byte" else list(texts)
        scores = score_lines(loaded, given, found[0], precision=trained.precision)
        if loaded.vocab.unk is not None and (unknown := loaded.vocab.unknown_in(given, "the text")):
            print(f"{unknown}, so bits are not comparable with other models.", file=sys.stderr)
        for each in scores:
            log_prob, ppl, cost = -each.nats, each.ppl, bits(each.nats)
            figures = {"log_prob": log_prob, "targets": each.targets, "bytes": each.bytes, "ppl": ppl, "bits": cost}
            plain = f"{log_prob:.6f}\t{ppl:.4f}\t{cost:.4f}"
            print(json.dumps({name: finite(value) for name, value in figures.items()}) if self.json else plain)
        report_infinite([each.nats for each in scores], "lines have no finite score. Use another checkpoint.")
