"""Fuzzing of all code that reads input of users, downloads and files of other programs.

    python -m experiments.fuzz --minutes 60 --seed 1 --out findings
    python -m experiments.fuzz --replay findings/store-1/case

A case is a folder of files made from the seed and the number of the case: valid examples, some of them mangled by
tests/mangled.py, and invented files. A finding is an exception other than our own sentence for the user, more than 10
seconds, more memory than allowed, a command or module that a file made run, or a result that differs from the input.
The first finding of each kind is kept with its traceback.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from transformer_xl.analysis.peak import peak_memory
from transformer_xl.checkpoint import LoadedModel, TrainingState, load_model, load_training, save_checkpoint
from transformer_xl.cli import main as cli
from transformer_xl.config.recipe import HINTS, SECTIONS, load_recipe, packaged_recipes, split_overrides, write_toml
from transformer_xl.config.settings import CorpusConfig, RunConfig, TransformerXLConfig
from transformer_xl.data.bpe import train_bpe
from transformer_xl.data.corpus import Corpus
from transformer_xl.data.loader import StreamLoader
from transformer_xl.data.reading import pieces
from transformer_xl.data.vocab import Vocab
from transformer_xl.interop import read_model, read_vocabulary, write_original
from transformer_xl.interop.pickles.unpickle import StandIn, module_state, read_pickle
from transformer_xl.interop.vocabulary import pickled_vocabulary
from transformer_xl.model.baselines import build_model
from transformer_xl.runtime.files import SEAL

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import hostile
from mangled import ODD_NUMBERS, mangled, mangled_json, mangled_pickle, mangled_safetensors, operations, toml_value

SECONDS, WAIT, MEMORY = 10, 120, 2 << 30
"""Limits of a case: processor seconds, seconds by the clock, and bytes beyond the peak of all examples."""
Case = dict[str, bytes]
TEXT = "the quick brown fox <unk> jumps\nover the lazy dog, \u00e9t\u00e9 \u4e2d\u6587\n" * 5
PLAIN = "the quick brown fox jumps\nover the lazy dog\n" * 5
SIGNS = [*TEXT, *"\r\0\t \u2028\u0085\ud800\U0001f600\u0301", "  ", " a", "'s"]


class Finding(BaseException):
    """A finding; no tested code may catch it as one of its own errors."""


def vocabularies() -> list[Vocab]:
    """A vocabulary of each kind."""
    own = [Vocab.build("byte", [PLAIN.encode()]), Vocab.build("byte", [PLAIN.encode()], newlines="drop", closed=True)]
    own += [Vocab.build("char", [TEXT], newlines="drop"), Vocab.build("char", [TEXT], closed=True)]
    own += [Vocab.build("word", [TEXT], newlines=newlines) for newlines in ("keep", "drop", "sentence")]
    return [*own, Vocab.build("word", [PLAIN], closed=True), Vocab.of_tokenizer(train_bpe([TEXT], 280))]


def contents(folder: Path) -> Case:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def one_mangled(dice: random.Random, case: Case, other: Case, name: str) -> None:
    """Change one file of a case: by its format, as bytes, or by replacing it with a file of `other`."""
    kind = Path(name).suffix
    if dice.random() < 0.15:
        case[name] = dice.choice([*other.values(), *case.values()])
    elif kind == ".json" and dice.random() < 0.8:
        case[name] = mangled_json(dice, case[name])
    elif kind == ".safetensors" and dice.random() < 0.8:
        case[name] = mangled_safetensors(dice, case[name])
    else:
        case[name] = mangled(dice, case[name], other.get(name, b""))


class Recipes:
    """Recipes and options of a command line: accepted settings are equal after writing and reading."""

    def __init__(self, folder: Path):
        self.files = [write_toml(RunConfig()).encode(), *(file.read_bytes() for file in packaged_recipes().values())]

    def make(self, dice: random.Random) -> Case:
        text = dice.choice(self.files)
        if dice.random() < 0.6:
            lines = []
            for section in dice.sample([*SECTIONS, "modle", "train"], dice.randrange(1, 5)):
                fields = dice.choices([*HINTS.get(section, {}), "n_layers"], k=dice.choice([1, 1, 1, 3]))
                lines += [f"[{section}]", *(f"{name} = {self.value(dice, section, name)}" for name in {*fields})]
            text = "\n".join(lines).encode("utf-8", "surrogatepass")
        text = mangled(dice, text, dice.choice(self.files)) if dice.random() < 0.5 else text
        words = []
        for _ in range(dice.choice([0, 0, 1, 2, 4])):
            section = dice.choice([*SECTIONS, "modle"])
            name = dice.choice([*HINTS.get(section, {}), "n_layers"])
            values = [self.value(dice, section, name) for _ in range(dice.choice([0, 1, 1, 1, 2]))]
            label = f"--{section}.{name.replace('_', dice.choice('-_'))}"
            words += [f"{label}={''.join(values)}"] if dice.random() < 0.2 else [label, *values]
        return {"recipe.toml": text, "words": "\0".join(words).encode("utf-8", "surrogatepass")}

    def value(self, dice: random.Random, section: str, name: str) -> str:
        """A value of the type of the setting, or any value."""
        if dice.random() < 0.5 and name in HINTS.get(section, {}):
            own = getattr(getattr(RunConfig(), section), name)
            return str(dice.choice(ODD_NUMBERS)) if own is None else json.dumps(own)
        return toml_value(dice)

    def check(self, folder: Path) -> None:
        words = (folder / "words").read_bytes().decode("utf-8", "surrogatepass").split("\0")
        config = load_recipe(folder / "recipe.toml", split_overrides(words)[0])
        (folder / "again.toml").write_text(write_toml(config), encoding="utf-8")
        if load_recipe(folder / "again.toml") != config:
            raise Finding("the recipe that was written reads otherwise")


class Stores:
    """Token stores: an opened store has exactly the ids of its header, and they can be read and decoded."""

    def __init__(self, folder: Path):
        text = PLAIN.encode()
        parts = {"train": [text * 4, text], "valid": [text], "test": [text, text]}
        self.stores: list[Case] = []
        for number, vocab in enumerate(vocabularies()):
            Corpus.build(folder / str(number), parts, vocab=vocab, documents=number % 2 == 0)
            self.stores.append(contents(folder / str(number)))

    def make(self, dice: random.Random) -> Case:
        store, other = dice.choice(self.stores), dice.choice(self.stores)
        case = dict(store)
        for _ in range(dice.choice([1, 1, 2])):
            one_mangled(dice, case, other, dice.choice(["corpus.json", "corpus.json", *case]))
        if dice.random() < 0.5:  # a forger leaves no wrong checksum
            for name in ("train.bin", "valid.bin", "test.bin"):
                before, now = (hashlib.sha256(files[name]).hexdigest().encode() for files in (store, case))
                case["corpus.json"] = case["corpus.json"].replace(before, now)
        return case

    def check(self, folder: Path) -> None:
        corpus = Corpus.open(folder)
        for name, header in corpus.header.splits.items():
            split = corpus.split(name)
            if hashlib.sha256(np.asarray(split.ids).tobytes()).hexdigest() != header.sha256:
                raise Finding("ids were accepted that are not those of the header")
            corpus.vocab.decode(split.ids[:50])
            loader = StreamLoader(split, batch_size=3, tgt_len=7)
            for segment in map(loader.segment, range(min(len(loader), 5))):
                if max(segment.ids.max(), segment.targets.max()) >= len(corpus.vocab):
                    raise Finding("an id is outside the vocabulary")
        _ = (corpus.about, corpus.caveat, corpus.vocab.token_sizes(), corpus.vocab.opening_ids, str(corpus.vocab))


class Checkpoints:
    """Checkpoints: a loaded checkpoint gives probabilities and has its training state."""

    def __init__(self, folder: Path):
        self.folders: list[Case] = []
        sizes, heads = {"n_layer": 1, "d_model": 8, "d_inner": 5}, {"n_head": 2, "d_head": 3}
        kinds: list[dict[str, Any]] = [
            heads,
            {"kind": "lstm"},
            heads | {"untie_r": True, "cutoffs": (5,), "div_val": 2},
        ]
        kinds += [heads | {"kind": "shaw", "positions": 9}]
        training = TrainingState(3, {"lr": 0.5, "names": ["a"]}, {"a": torch.ones(2), "b": torch.zeros(3).long()})
        for number, (vocab, kind) in enumerate(zip([*vocabularies()[::3], vocabularies()[-1]], kinds, strict=True)):
            path = folder / f"step_{number:08d}"
            model = TransformerXLConfig(vocab_size=len(vocab), **sizes | kind)
            config = RunConfig(model=model, corpus=CorpusConfig(unit=vocab.unit, newlines=vocab.newlines))
            save_checkpoint(path, model=build_model(model), vocab=vocab, config=config, training=training)
            (path / SEAL).unlink()  # who alters a file on purpose writes its checksum anew
            self.folders.append(contents(path))

    def make(self, dice: random.Random) -> Case:
        case, other = dict(dice.choice(self.folders)), dice.choice(self.folders)
        for _ in range(dice.choice([1, 1, 1, 2])):
            one_mangled(dice, case, other, dice.choice(["config.json", "config.json", *case]))
        if dice.random() < 0.05:
            case.pop(dice.choice(list(case)))
        return case

    def check(self, folder: Path) -> None:
        loaded = load_model(folder)
        ids = torch.arange(5)[None] % len(loaded.vocab)
        log_probs, _ = loaded.model.log_probs(ids, None, loaded.config.eval_lengths)
        if log_probs.shape != (1, 5, len(loaded.vocab)):
            raise Finding(f"probabilities are of shape {list(log_probs.shape)}")
        loaded.vocab.decode(ids[0])
        loaded.vocab.encode("")
        load_training(folder)


class Pickles:
    """Pickle files: nothing that they ask for is executed."""

    def __init__(self, folder: Path):
        plain: dict[str, Any] = {"idx2sym": ["a", "b", "\u00e9"], "counter": Counter("aab"), "n": (1, 2.5, None, b"x")}
        state = OrderedDict(a=torch.arange(6.0).view(2, 3), b=torch.ones(2, dtype=torch.int16))
        self.files = [pickle.dumps(plain, protocol) for protocol in range(2, 6)]
        for new in (True, False):
            file = io.BytesIO()
            torch.save({"model_state": state, "more": plain}, file, _use_new_zipfile_serialization=new)
            self.files.append(file.getvalue())
        self.files += [make("true") for make in hostile.files(200).values()]
        self.pickles = [parts for content in self.files if len(content) < 1 << 16 and (parts := operations(content))]
        self.pool = [part for parts in self.pickles for part in parts]

    def make(self, dice: random.Random) -> Case:
        if dice.random() < 0.3:
            return {"model.pt": mangled(dice, dice.choice(self.files), dice.choice(self.files))}
        parts = dice.choice(self.pickles) if dice.random() < 0.8 else dice.choices(self.pool, k=12)
        wrap = dice.choice([bytes, bytes, hostile.torch_zip, hostile.legacy])
        return {"model.pt": wrap(mangled_pickle(dice, parts, self.pool))}

    def check(self, folder: Path) -> None:
        content = read_pickle(folder / "model.pt")
        repr(content)
        pickled_vocabulary(content, "model.pt")
        if isinstance(content, StandIn):
            module_state(content)


class Foreign:
    """Folders of other programs: settings that contradict the weights, truncated weights, weights with other names."""

    def __init__(self, folder: Path):
        from transformer_xl.hf import export_huggingface

        vocab = Vocab.build("word", [TEXT])
        shape = TransformerXLConfig(vocab_size=len(vocab), n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=5)
        config = RunConfig(model=shape, corpus=CorpusConfig(unit="word"))
        loaded = LoadedModel(build_model(shape).eval(), vocab, config)
        write_original(loaded, folder / "original")
        export_huggingface(loaded, folder / "huggingface")
        self.folders = [{"program": file.name.encode()} | contents(file) for file in folder.iterdir()]

    def make(self, dice: random.Random) -> Case:
        case = dict(dice.choice(self.folders))
        for _ in range(dice.choice([1, 1, 2])):
            one_mangled(dice, case, {}, dice.choice([name for name in case if name != "program"]))
        return case

    def check(self, folder: Path) -> None:
        program: Any = (folder / "program").read_text()
        found = read_model(folder, program)
        ids = torch.arange(5)[None] % found.config.model.vocab_size
        found.model().log_probs(ids, None, found.config.eval_lengths)


class Tokenisers:
    """Vocabularies from files and from texts: an accepted vocabulary restores every text that it covers."""

    def __init__(self, folder: Path):
        self.vocabs = [json.dumps(vocab.to_json()).encode() for vocab in vocabularies()]
        self.tokenizer = train_bpe([TEXT], 300).encode()
        self.lists = [b"a\nb\nthe\n<eos>\n<unk>\n", b"a 5\nb 4\nthe 3\n", "\u00e9\n\u4e2d\n".encode()]

    def make(self, dice: random.Random) -> Case:
        text = "".join(dice.choices(SIGNS, k=dice.randrange(80))).encode("utf-8", "ignore")
        case = {"text": mangled(dice, text) if dice.random() < 0.1 else text, "size": bytes([dice.randrange(1, 40)])}
        match dice.randrange(4):
            case 0:
                return case | {"vocab.json": mangled_json(dice, dice.choice(self.vocabs))}
            case 1:
                return case | {"words.txt": mangled(dice, dice.choice(self.lists), dice.choice(self.lists))}
            case 2:
                return case | {"tokenizer.json": mangled_json(dice, self.tokenizer)}
        return case

    def check(self, folder: Path) -> None:
        text, size = (folder / "text").read_bytes(), (folder / "size").read_bytes()[0]
        if (folder / "vocab.json").exists():
            vocabs = [read_vocabulary(folder / "vocab.json")[0]]
        elif (folder / "words.txt").exists():
            vocabs = [Vocab.read((folder / "words.txt").read_bytes(), "words.txt")]
        elif (folder / "tokenizer.json").exists():
            vocabs = [Vocab.read((folder / "tokenizer.json").read_bytes(), "tokenizer.json", unit="bpe")]
        else:
            text = text.decode("utf-8", "ignore").encode()
            vocabs = [Vocab.build("byte", [text]), Vocab.build("char", [text]), Vocab.build("word", [text])]
            vocabs += [Vocab.of_tokenizer(self.tokenizer.decode())]
        for vocab in vocabs:
            if Vocab.from_json(json.loads(json.dumps(vocab.to_json()))) != vocab:
                raise Finding("the vocabulary that was written reads otherwise")
            self.round_trip(vocab, text if vocab.unit == "byte" else text.decode("utf-8", "replace").encode(), size)

    def round_trip(self, vocab: Vocab, text: bytes, size: int) -> None:
        """Check that ids decode to the text, and that its pieces have the same ids."""
        if vocab.unit == "word" and not text.endswith(b"\n"):
            text += b"\n"  # as `pieces` does
        ids, kept = vocab.encode(text), text.replace(b"\n", b" " if vocab.unit == "word" else b"")
        back, kept = vocab.decode_bytes(ids), kept if vocab.newlines == "drop" else text
        if vocab.token_sizes().shape != (len(vocab),):
            raise Finding("a symbol has no size")
        if vocab.unit == "word":
            back, kept = (b" ".join(word.encode() for word in side.decode().split()) for side in (back, kept))
        if back != kept and not (vocab.unk is not None and vocab.unk in ids):
            raise Finding(f"{vocab.unit}s came back otherwise: {kept[:80]!r} as {back[:80]!r}")
        parts = [vocab.encode(piece) for piece in pieces(text, vocab.unit, size)]
        if np.concatenate([ids[:0], *parts]).tolist() != ids.tolist():
            raise Finding(f"pieces of {vocab.unit}s have other ids: {text[:80]!r}")


TARGETS: dict[str, type[Any]] = {
    "recipe": Recipes,
    "store": Stores,
    "checkpoint": Checkpoints,
    "pickle": Pickles,
    "foreign": Foreign,
    "tokeniser": Tokenisers,
}
FORBIDDEN = {
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect", "pickle.find_class")
}


@dataclass
class Tally:
    """The outcomes of one target's cases."""

    tried: int = 0
    refused: int = 0
    accepted: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    sentences: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)


def outcome(target: Any, folder: Path) -> tuple[str, str]:
    """The outcome of a case: "accepted", "refused" with the sentence, or "finding" with its kind and traceback."""
    try:
        target.check(folder)
        return "accepted", ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        sentence = cli.users_sentence(error) if isinstance(error, Exception) else None
        if sentence is not None and not sentence.startswith("There is not enough memory"):
            return "refused", sentence.replace(str(folder), "FOLDER")
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "transformer_xl" in frame.filename]
        place = f" in {Path(frames[-1].filename).name}: {frames[-1].name}" if frames else ""
        about = f": {str(error).partition(':')[0]}" if isinstance(error, Finding) else ""
        return "finding", f"{type(error).__name__}{place}{about}\n{traceback.format_exc()}"


def in_time(target: Any, folder: Path) -> tuple[str, str]:
    """`outcome`, or a finding if the case takes too long."""
    clocks = {signal.ITIMER_PROF: SECONDS, signal.ITIMER_REAL: WAIT}
    for clock, seconds in clocks.items():
        signal.setitimer(clock, seconds)
    try:
        return outcome(target, folder)
    finally:
        for clock in clocks:
            signal.setitimer(clock, 0)


def watch() -> None:
    """Limit the time of a case and the memory of the process, and detect forbidden actions."""

    def late(*_: object) -> None:
        raise Finding(f"more than {SECONDS} seconds, or {WAIT} by the clock")

    def forbid(event: str, arguments: tuple[Any, ...]) -> None:
        if event in FORBIDDEN:
            raise Finding(f"{event}: {arguments!r:.80}")

    statm = Path("/proc/self/statm")
    if statm.exists():
        held = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, resource.RLIM_INFINITY))
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, late)
    sys.addaudithook(forbid)


def campaign(minutes: float, seed: int, out: Path, names: list[str], scratch: Path) -> dict[str, Tally]:
    """Try cases of the target that has had the least time, until the time is over."""
    targets = {}
    for name in names:
        (scratch / name).mkdir()
        targets[name] = TARGETS[name](scratch / name)
    watch()
    tallies, case = {name: Tally() for name in names}, scratch / "case"
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        name = min(names, key=lambda name: tallies[name].seconds)
        tally, start = tallies[name], time.monotonic()
        shutil.rmtree(case, ignore_errors=True)
        case.mkdir()
        for file, content in targets[name].make(random.Random(f"{seed} {name} {tally.tried}")).items():
            (case / file).write_bytes(content)
        made = time.monotonic()
        result, told = in_time(targets[name], case)
        kind = told.partition("\n")[0]
        tally.slowest = max(tally.slowest, time.monotonic() - made)
        tally.refused += result == "refused"
        tally.accepted += result == "accepted"
        if result == "refused":
            tally.sentences[kind[:200]] += 1
        elif result == "finding":
            tally.findings[kind] += 1
            if tally.findings[kind] == 1:
                keep(out / f"{name}-{len(tally.findings)}", case, f"seed {seed}, {name} {tally.tried}: {told}")
        tally.tried += 1
        tally.seconds += time.monotonic() - start
    return tallies


def keep(folder: Path, case: Path, told: str) -> None:
    """Write a reproducer: the files of the case, and its outcome."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(case, folder / "case")
    (folder / "told.txt").write_text(told, "utf-8", "backslashreplace")
    print(f"{folder}: {told.splitlines()[0]}", file=sys.stderr, flush=True)


def show(tallies: dict[str, Tally]) -> None:
    print("| target | inputs tried | refused with a sentence | accepted | findings | of kinds | slowest, s |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, t in tallies.items():
        found = f"{t.findings.total():,} | {len(t.findings)}"
        print(f"| {name} | {t.tried:,} | {t.refused:,} | {t.accepted:,} | {found} | {t.slowest:.2f} |")
    print(f"\nPeak memory: {peak_memory() / 1e6:,.0f} MB\n")
    for name, tally in tallies.items():
        for what, told in [("finding", tally.findings), ("sentence", tally.sentences)]:
            for kind, count in told.most_common(12):
                print(f"- {name}, {what}, {count:,} times: {kind}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("findings"))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--replay", type=Path, metavar="CASE", help="show what becomes of a finding's case now")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if given.replay:
            (scratch / "made").mkdir()
            target = TARGETS[given.replay.resolve().parent.name.partition("-")[0]](scratch / "made")
            watch()
            shutil.copytree(given.replay, scratch / "case")
            print(*in_time(target, scratch / "case"))
            return
        print(f"seed {given.seed}, {given.minutes:g} minutes", flush=True)
        show(campaign(given.minutes, given.seed, given.out, given.targets, scratch))


if __name__ == "__main__":
    main()
