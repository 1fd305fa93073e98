"""Bach's chorales as token ids: train, score with and without memory and beside an LSTM, and write a chorale.

$ python examples/music.py
...
transformer-xl: 0.5515 nats per token of test with memory, 0.6022 without (887,532 parameters, 230 seconds of training)
lstm: 0.5606 nats per token of test with memory, 0.5804 without (895,340 parameters, 113 seconds of training)
The first sample is runs/music/chorale.mid, chorale.musicxml and chorale.svg

The chorales are those in 4/4 of the package music21. Time is a grid of sixteenths. On each of its steps every voice has
one token, from soprano to bass: a note begins, the note goes on, or the voice is silent. So a bar has 64 tokens, and a
memory has a fixed length in bars. Training is in 12 keys; a melody is in one split. Measured on one busy core.
"""

import time
import zlib
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import tyro
import verovio
from music21 import clef, corpus, note, pitch, stream

import transformer_xl as xl
from transformer_xl.model.baselines import build_model

HOLD, REST, LOWEST = 0, 1, 28  # a note that begins is its MIDI number less LOWEST; id 0 begins and ends a chorale
SHAPES = {
    "transformer-xl": {"n_layer": 4, "n_head": 4, "d_head": 32, "d_inner": 512, "pre_lnorm": True, "final_norm": True},
    "lstm": {"n_layer": 2, "d_inner": 336},
}
CLEFS = (clef.TrebleClef, clef.TrebleClef, clef.Treble8vbClef, clef.BassClef)


def grid_of(score: stream.Score) -> np.ndarray:
    """A chorale as an array of steps by voices. An upbeat is the end of a whole bar."""
    upbeat = score.parts[0].getElementsByClass("Measure")[0].paddingLeft
    grid = np.full((round(4 * (score.highestTime + upbeat)), 4), HOLD)
    grid[0] = REST
    for voice, part in enumerate(score.parts):
        for each in part.stripTies().flatten().notes:
            begin, end = (round(4 * (upbeat + x)) for x in (each.offset, each.offset + each.quarterLength))
            grid[begin:end, voice][:1] = each.pitches[-1].midi - LOWEST
            grid[end : end + 1, voice] = REST  # unless the next note begins there
    return grid


def write_ids(folder: Path, most: int) -> None:
    """Write a file of ids for each of the first `most` chorales that suit, in the folder of its split."""
    pieces: dict[str, list[np.ndarray]] = {"train": [], "valid": [], "test": []}
    for score in islice(corpus.chorales.Iterator(), most):
        meters = {meter.ratioString for meter in score.recurse().getElementsByClass("TimeSignature")}
        if len(score.parts) != 4 or meters != {"4/4"}:
            continue
        grid = grid_of(score)
        melody = np.diff(grid[grid[:, 0] > REST, 0])[:8]
        split = ("valid", "test", *["train"] * 8)[zlib.crc32(melody.tobytes()) % 10]
        for key in range(-5, 7) if split == "train" else (0,):
            pieces[split].append(np.pad((1 + 64 * np.arange(4) + grid + key * (grid > REST)).ravel(), 1))
    if not all(pieces.values()):
        raise SystemExit(f"--chorales must be large enough for a chorale in each split, got {most}.")
    for split, found in pieces.items():
        (folder / split).mkdir(parents=True)
        for number, piece in enumerate(np.random.default_rng(1).permutation(len(found))):
            np.save(folder / split / f"{number:05}.npy", found[piece])
        print(f"{split}: {len(found) // (12 if split == 'train' else 1)} chorales, {sum(map(len, found)):,} tokens")


def notation(ids: list[int]) -> stream.Score:
    """The notes of a chorale, whole steps of four ids; ids after its end are left out."""
    end = ids.index(0) if 0 in ids else len(ids)
    grid = (np.array(ids[: end // 4 * 4]).reshape(-1, 4) - 1) % 64
    score = stream.Score()
    for voice, sign in zip(grid.T, CLEFS, strict=True):
        notes: list[clef.Clef | note.GeneralNote] = [sign()]
        for begin, end in pairwise([0, *(1 + np.flatnonzero(voice[1:] != HOLD)), len(voice)] if len(voice) else []):
            value, length = int(voice[begin]), (end - begin) / 4
            name = pitch.Pitch(value + LOWEST).nameWithOctave
            notes.append(note.Note(name, quarterLength=length) if value > REST else note.Rest(length))
        score.insert(0, stream.Part(notes))
    return score


def main(steps: int = 800, chorales: int = 400, seed: int = 1111, out: Path = Path("runs/music")) -> None:
    """Train two models for STEPS steps on the first CHORALES chorales, and leave the runs and a new chorale in OUT."""
    if steps < 1:
        raise SystemExit(f"--steps must be at least 1, got {steps}.")
    if out.exists():
        raise SystemExit(f"--out must be a new folder, and {out} exists. Remove it, or name another.")
    with TemporaryDirectory() as folder:
        write_ids(Path(folder), chorales)
        settings = ["--corpus.unit=id", "--corpus.reset-documents", "--train.sample-every=0", f"--train.seed={seed}"]
        own = xl.load_recipe("text-small", [*settings, f"--train.max-steps={steps}"], data=folder)
        data = xl.open_corpus(own.corpus)
    for (kind, shape), lr in zip(SHAPES.items(), (2e-2, 1e-2), strict=True):  # at 4e-2 the LSTM diverged
        model = xl.TransformerXLConfig(vocab_size=0, kind=kind, d_model=128, dropout=0.1, **shape)
        config = xl.resolve_settings(replace(own, model=model, train=replace(own.train, lr=lr)), data)
        torch.manual_seed(config.train.seed)
        model, begun = build_model(config.model), time.perf_counter()
        xl.fit(model, data, config, out / kind)
        size, seconds = sum(weight.numel() for weight in model.parameters()), time.perf_counter() - begun
        nats = []
        for mem_len in (256, 0):
            loaded = xl.load_model(out / kind).with_lengths(mem_len=mem_len)
            lengths = loaded.config.eval_lengths
            test = xl.StreamLoader(data.split("test"), batch_size=8, tgt_len=lengths.tgt_len)
            nats.append(xl.evaluate(loaded.model, test, lengths).loss)
        print(f"{kind}: {nats[0]:.4f} nats per token of test with memory, {nats[1]:.4f} without", end=" ")
        print(f"({size:,} parameters, {seconds:.0f} seconds of training)")
    ids = xl.load_model(out / "transformer-xl").generate("0", max_tokens=64 * 12, temperature=0.8, seed=1).split()
    score, page = notation(list(map(int, ids))), verovio.toolkit()
    score.write("midi", out / "chorale.mid")
    page.setOptions({"adjustPageHeight": True, "header": "none", "footer": "none", "scale": 40})
    page.loadFile(str(score.write("musicxml", out / "chorale.musicxml")))
    page.renderToSVGFile(str(out / "chorale.svg"))
    print(f"The first sample is {out}/chorale.mid, chorale.musicxml and chorale.svg")


if __name__ == "__main__":
    tyro.cli(main)
