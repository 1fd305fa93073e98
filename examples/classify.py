"""Classes of long documents: a fine-tuned model, its frozen features, and TF-IDF.

$ pip install scikit-learn "transformers>=5"
$ python examples/classify.py
...
seed 2: 256 documents to learn from, 160 others to test
fine-tuned   right: 41.9% (38.1%, 42.5%, 45.0%)
frozen       right: 54.8% (56.9%, 52.5%, 55.0%)
TF-IDF       right: 83.1% (80.6%, 87.5%, 81.2%)
6,000 bytes, the gradient of one segment: 3.50 GB at most so far
24,000 bytes, the gradient of one segment: 3.50 GB at most so far
96,000 bytes, the gradient of one segment: 3.50 GB at most so far
6,000 bytes, the gradient of all segments: 3.50 GB at most so far
24,000 bytes, the gradient of all segments: 3.50 GB at most so far
96,000 bytes, the gradient of all segments: 5.46 GB at most so far

(A quarter of an hour per seed on one thread; --seeds 1 --epochs 2 is shorter.)

The task: to which of eight packages of torch does a file belong? A document is the first 6,000 bytes of a file, read
in segments of 128 with memory. A small language model first reads the training files without their labels. Then

    fine-tuned    all of its weights learn the classes, by `AutoModelForSequenceClassification`: each step has the
                  gradient of one segment, drawn at random, so that a document of any length needs the same RAM
    frozen        logistic regression on the mean outputs of its layers
    TF-IDF        logistic regression on weights of words

Each seed draws other files. TF-IDF wins: the words of a file name its package. A model of bytes that read 1.4 MB has
learned little more than spelling, and 256 documents are few to learn classes by all of its weights.
"""

import random
import resource
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import tyro
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegressionCV
from sklearn.preprocessing import StandardScaler
from transformers import AutoModel, AutoModelForSequenceClassification

from transformer_xl import TransformerXL, fit, load_model, load_recipe, open_corpus, resolve_settings
from transformer_xl.hf import export_huggingface

PACKAGES = ("_dynamo", "_inductor", "ao", "distributed", "fx", "nn", "testing", "utils")
SIZE = 6000
SMALL = ["--model.n-layer=3", "--model.n-head=2", "--model.d-model=128", "--model.d-inner=512"]
SMALL += ["--train.tgt-len=128", "--train.mem-len=128", "--train.eval-tokens=5000"]


def documents(count: int, seed: int) -> tuple[list[bytes], list[int], list[bytes], list[int]]:
    """The beginnings of `count` files of each package to learn from, and of up to 20 others, with their labels."""
    draw, found = random.Random(seed), ([], [], [], [])
    for label, package in enumerate(PACKAGES):
        files = sorted(Path(torch.__file__).parent.joinpath(package).rglob("*.py"))
        texts = [text[:SIZE] for file in files if len(text := file.read_bytes()) >= SIZE]
        draw.shuffle(texts)
        for number, part in enumerate((texts[:count], texts[count : count + 20])):
            found[2 * number].extend(part)
            found[2 * number + 1].extend([label] * len(part))
    return found


def train_model(texts: list[bytes], steps: int, folder: Path) -> Path:
    """A small language model of the documents, in a folder that transformers loads."""
    (folder / "source.txt").write_bytes(b"".join(random.Random(1).sample(texts, len(texts))))
    config = load_recipe("text-fast", [*SMALL, f"--train.max-steps={steps}"], data=folder / "source.txt")
    corpus = open_corpus(config.corpus)
    config = resolve_settings(config, corpus)
    torch.manual_seed(config.train.seed)
    fit(TransformerXL(config.model, backend=config.train.backend), corpus, config, folder / "run")
    export_huggingface(load_model(folder / "run"), folder / "exported")
    return folder / "exported"


def ids_of(texts: list[bytes]) -> torch.Tensor:
    return torch.from_numpy(np.stack([np.frombuffer(text, np.uint8) for text in texts])).long()


@torch.no_grad()
def mean_outputs(folder: Path, texts: list[bytes]) -> np.ndarray:
    """The mean over positions of the output of each layer, one row a document."""
    model = AutoModel.from_pretrained(folder).eval()
    states = [model(part, output_hidden_states=True).hidden_states for part in ids_of(texts).split(16)]
    return torch.cat([torch.cat([layer.mean(1) for layer in layers], -1) for layers in states]).numpy()


def fine_tuned(folder: Path, texts: list[bytes], labels: list[int], epochs: int, lr: float = 1e-3):
    """A classifier after some epochs over the documents."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(PACKAGES)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    steps = epochs * (len(texts) // 8)
    # 0.1 of 10 steps would divide by zero
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1001)
    for _ in range(epochs):
        order = torch.randperm(len(texts)).tolist()
        for part in (order[i : i + 8] for i in range(0, len(order) - 7, 8)):
            loss = model(ids_of([texts[i] for i in part]), labels=torch.tensor([labels[i] for i in part])).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(), optimizer.zero_grad(), schedule.step()
    return model.eval()


def main(steps: int = 400, count: int = 32, epochs: int = 8, seeds: int = 3) -> None:
    """Train the language model for STEPS steps, and the classifiers on COUNT documents of each package."""
    if min(steps, epochs, seeds) < 1 or count < 3:
        sys.exit(f"--steps, --epochs and --seeds must be at least 1, and --count 3, got {steps, epochs, seeds, count}.")
    rows = {"fine-tuned": [], "frozen": [], "TF-IDF": []}
    for seed in range(seeds):
        texts, labels, others, truth = documents(count, seed)
        with TemporaryDirectory() as name:
            folder = train_model(texts, steps, Path(name))
            torch.manual_seed(seed)
            model = fine_tuned(folder, texts, labels, epochs)
            with torch.no_grad():
                found = torch.cat([model(part).logits.argmax(1) for part in ids_of(others).split(16)])
            rows["fine-tuned"].append((found == torch.tensor(truth)).double().mean().item())
            tfidf, scale = TfidfVectorizer(decode_error="replace", sublinear_tf=True), StandardScaler()
            frozen = (scale.fit_transform(mean_outputs(folder, texts)), scale.transform(mean_outputs(folder, others)))
        for way, (learned, tested) in {
            "frozen": frozen,
            "TF-IDF": (tfidf.fit_transform(texts), tfidf.transform(others)),
        }.items():
            classifier = LogisticRegressionCV(
                Cs=(0.01, 0.1, 1, 10), cv=3, max_iter=500, scoring="accuracy", use_legacy_attributes=False
            ).fit(learned, labels)
            rows[way].append(classifier.score(tested, truth))
        print(f"seed {seed}: {len(texts)} documents to learn from, {len(others)} others to test")
    for way, right in rows.items():
        print(f"{way:12} right: {np.mean(right):.1%} ({', '.join(f'{each:.1%}' for each in right)})")
    model.train()
    for segments, said in ((1, "one segment"), (None, "all segments")):
        model.config.gradient_segments = segments
        for length in (SIZE, 4 * SIZE, 16 * SIZE):
            model(torch.randint(256, (1, length)), labels=torch.tensor([0])).loss.backward()
            gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
            print(f"{length:,} bytes, the gradient of {said}: {gigabytes:.2f} GB at most so far")


if __name__ == "__main__":
    tyro.cli(main)
