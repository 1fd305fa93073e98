"""Compress a file with a trained model of bytes: bits per character are bytes on disk.

$ python examples/compress.py runs/my my/windows_utils.py utils.txl
my/windows_utils.py: 5,060 bytes became 1,282 (2.027 bits per byte; the model's own figure is 1.863)

With --restore, utils.txl and a new name it gives the text again. (runs/my is the run of the README, and this file is in
its test split. xz -9e makes 1,680 bytes of it.)

A range coder (constriction) gives a byte of probability p a code of -log2 p bits. To restore it, the same probabilities
have to be computed again, to the last bit. Only the same processor, number of threads and versions of the libraries do
that; elsewhere restoring fails and says so. So this shows what a score means. It is no format to keep files in.

The text is cut into rows that are read side by side, because a batch is faster. The file is a line of JSON, then the
code.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import constriction
import numpy as np
import torch
import tyro
from tyro.conf import Positional

from transformer_xl import LanguageModel, load_model

CATEGORICAL = constriction.stream.model.Categorical(perfect=False)


class Predictor:
    """The probabilities of each row's next byte, after the bytes that it was given so far."""

    def __init__(self, loaded: LanguageModel, rows: int):
        self.model = loaded.model.for_inference()
        self.lengths = loaded.config.eval_lengths
        self.state = self.model.empty_cache(rows, self.lengths)
        self.probabilities = self.read(np.full(rows, loaded.vocab.line_end or 0))

    @torch.no_grad()
    def read(self, ids: np.ndarray) -> np.ndarray:
        """Read one token of each row. Return the probabilities after it, [rows, tokens]."""
        column = torch.from_numpy(ids.astype(np.int64))[:, None]
        log_probs, self.state = self.model.log_probs(column, self.state, self.lengths, last=1)
        self.probabilities = log_probs[:, -1].double().exp().numpy()
        return self.probabilities


def steps(count: int, name: str) -> Iterator[int]:
    """The numbers of the steps, with their progress on standard error."""
    for step in range(count):
        if step % 64 == 0:
            print(f"\r{name}: {step / count:4.0%}", end="", file=sys.stderr)
        yield step
    print(f"\r{name}: done", file=sys.stderr)


def compressed(loaded: LanguageModel, text: bytes, rows: int) -> tuple[bytes, float]:
    """The file of a text, and the model's own cost of it in bits per byte."""
    ids = loaded.vocab.encode(text)
    if loaded.vocab.decode_bytes(ids) != text:
        sys.exit("The model must be of bytes, and know all bytes of the text.")
    length = -(-len(ids) // rows)
    table = np.zeros((rows, length), np.int32)
    table.flat[: len(ids)] = ids  # the last row ends with padding, which is coded too
    predictor, coder, bits = Predictor(loaded, rows), constriction.stream.queue.RangeEncoder(), 0.0
    for step in steps(length, "compressing"):
        column = table[:, step]
        coder.encode(column, CATEGORICAL, predictor.probabilities)
        bits -= np.log2(predictor.probabilities[np.arange(rows), column]).sum()
        predictor.read(column)
    about = {"bytes": len(text), "rows": rows, "sha256": hashlib.sha256(text).hexdigest()}
    return json.dumps(about).encode() + b"\n" + coder.get_compressed().tobytes(), bits / max(len(text), 1)


def restored(loaded: LanguageModel, content: bytes) -> bytes:
    """The text of a file that `compressed` made."""
    line, _, code = content.partition(b"\n")
    try:
        about = json.loads(line)
        rows, length, digest = about["rows"], -(-about["bytes"] // about["rows"]), about["sha256"]
        table, words = np.zeros((rows, length), np.int32), np.frombuffer(code, np.uint32)
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        sys.exit("SOURCE must be a file that this program has compressed, and is not.")
    predictor = Predictor(loaded, rows)
    coder = constriction.stream.queue.RangeDecoder(words)
    for step in steps(length, "restoring"):
        table[:, step] = coder.decode(CATEGORICAL, predictor.probabilities)
        predictor.read(table[:, step])
    text = loaded.vocab.decode_bytes(table.ravel()[: about["bytes"]])
    if hashlib.sha256(text).hexdigest() != digest:
        sys.exit(
            "The text is another one than was compressed: the file is damaged, or the model, the processor, the number "
            "of threads or the versions of the libraries are others. Restore it where it was compressed."
        )
    return text


def main(
    run: Positional[str], source: Positional[Path], target: Positional[Path], restore: bool = False, rows: int = 16
) -> None:
    """Compress a file, or restore one.

    Args:
        run: a run of `txl train` on bytes, or anything else that `load_model` takes.
        source: the file to read.
        target: the file to write.
        restore: restore `source` instead of compressing it.
        rows: number of rows that are read side by side. Each begins without a past, so fewer compress better, slowly.
    """
    if rows < 1:
        sys.exit(f"--rows must be at least 1, got {rows}.")
    if not target.parent.is_dir():
        sys.exit(f"TARGET must be in a folder that exists, got {target}.")
    loaded, content = load_model(run), source.read_bytes()
    if restore:
        target.write_bytes(restored(loaded, content))
        return
    file, bits = compressed(loaded, content, min(rows, max(len(content), 1)))
    target.write_bytes(file)
    real = 8 * len(file) / max(len(content), 1)
    cost = f"{real:.3f} bits per byte; the model's own figure is {bits:.3f}"
    print(f"{source}: {len(content):,} bytes became {len(file):,} ({cost})")


if __name__ == "__main__":
    tyro.cli(main)
