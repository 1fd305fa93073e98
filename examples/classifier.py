"""Features for a classifier: the mean hidden states of a small language model, against TF-IDF.

$ pip install scikit-learn
$ python examples/classifier.py
...
240 labelled pieces, 360 of other files to test, 6 packages
58.9% right: logistic regression on 1801 weights of words by TF-IDF
35.0% right: logistic regression on 256 mean hidden states

The task: from which package of the standard library is a piece of 256 bytes of source? Whole files are held out. The
language model reads the training files without their labels; both classifiers then learn from a few labelled pieces.
TF-IDF wins: the words of a piece often name its package.
"""

import random
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import tyro
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegressionCV
from sklearn.preprocessing import StandardScaler

from transformer_xl import LanguageModel, TransformerXL, fit, load_model, load_recipe, open_corpus, resolve_settings

PACKAGES = ("asyncio", "email", "importlib", "multiprocessing", "tkinter", "unittest")
SIZE = 256
SMALL = ["--model.n-layer=2", "--model.n-head=2", "--model.d-model=128", "--model.d-inner=512"]
SMALL += ["--train.tgt-len=64", "--train.mem-len=64", "--train.eval-tokens=5000"]


def sources() -> tuple[dict[str, list[bytes]], dict[str, list[bytes]]]:
    """The files of each package for training and for testing: every third one is held out."""
    train, test = {}, {}
    for package in PACKAGES:
        files = sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py"))
        texts = [text for file in files if "test" not in file.parts and len(text := file.read_bytes()) > 2 * SIZE]
        train[package], test[package] = [t for i, t in enumerate(texts) if i % 3], texts[::3]
    return train, test


def pieces(files: dict[str, list[bytes]], count: int, seed: int) -> tuple[list[bytes], list[str]]:
    """`count` random pieces of the files of each package, and their labels."""
    draw, found, labels = random.Random(seed), [], []
    for package, texts in files.items():
        for _ in range(count):
            text = draw.choice(texts)
            start = draw.randrange(len(text) - SIZE)
            found.append(text[start : start + SIZE])
            labels.append(package)
    return found, labels


def train_model(files: dict[str, list[bytes]], steps: int) -> LanguageModel:
    """A small language model of the files."""
    with TemporaryDirectory() as folder:
        texts = [text for package in files.values() for text in package]
        random.Random(1).shuffle(texts)
        Path(folder, "source.txt").write_bytes(b"".join(texts))
        config = load_recipe("text-fast", [*SMALL, f"--train.max-steps={steps}"], data=Path(folder, "source.txt"))
        corpus = open_corpus(config.corpus)
        config = resolve_settings(config, corpus)
        torch.manual_seed(config.train.seed)
        fit(TransformerXL(config.model, backend=config.train.backend), corpus, config, Path(folder, "run"))
        return load_model(Path(folder, "run"))


@torch.no_grad()
def mean_states(loaded: LanguageModel, texts: list[bytes]) -> np.ndarray:
    """The mean over positions of the output of each layer, one row a text."""
    model, lengths, memory = loaded.model, loaded.config.eval_lengths, None
    ids = torch.from_numpy(np.stack([loaded.vocab.encode(text) for text in texts])).long()
    sums = 0
    for segment in ids.split(lengths.tgt_len, dim=1):
        outputs, memory = model.backbone(model.embedding(segment), memory, lengths)
        sums = sums + torch.cat(outputs, dim=-1).sum(1)
    return (sums / SIZE).numpy()


def main(steps: int = 150, labelled: int = 40) -> None:
    """Train the language model for STEPS steps, and both classifiers on LABELLED pieces of each package."""
    train, test = sources()
    model = train_model(train, steps)
    texts, labels = pieces(train, labelled, seed=1)
    held_out, truth = pieces(test, 60, seed=2)
    print(f"{len(texts)} labelled pieces, {len(held_out)} of other files to test, {len(PACKAGES)} packages")

    tfidf = TfidfVectorizer(decode_error="replace", sublinear_tf=True)
    scale = StandardScaler()
    features = {
        "weights of words by TF-IDF": (tfidf.fit_transform(texts), tfidf.transform(held_out)),
        "mean hidden states": (
            scale.fit_transform(mean_states(model, texts)),
            scale.transform(mean_states(model, held_out)),
        ),
    }
    for name, (learned, tested) in features.items():
        classifier = LogisticRegressionCV(Cs=(0.01, 0.1, 1, 10), cv=3, max_iter=500).fit(learned, labels)
        print(f"{classifier.score(tested, truth):.1%} right: logistic regression on {learned.shape[1]} {name}")


if __name__ == "__main__":
    tyro.cli(main)
