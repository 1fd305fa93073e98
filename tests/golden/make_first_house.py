"""Golden runs of the first house: what the package wrote at commit c0ece7e, and the numbers it then gave.

    python tests/golden/make_first_house.py             write tests/golden/first_house/; this needs that commit
    python tests/golden/make_first_house.py --compare   measure those folders with the code at hand; print JSON

Made on 2026-11-22 with Python 3.11.7, torch 2.13.0 (CPU), transformers 5.23.0 and safetensors 0.8.0, in one thread on
an AMD EPYC of the third generation (AVX2).

    text/             train.txt, valid.txt and test.txt: lines of made-up words. The runs store the relative path
                      `text`, so every command runs in the folder that holds it
    documents/        the same of many short files
    trained/NAME/     a run of 8 steps as it was after step 4, with the training state
    huggingface/      trained/xl by `txl convert --to-format huggingface`; its Python files lie in code.zip
    original/         trained/original by `txl convert --to-format original`
    expected.json     what `measure` returns, and for each run which weight each stored moment belongs to

The weights start large and the learning rates are high: losses then depend on the memory, on the moments and on the
random state. Models draw dropout masks from 64-bit integers, which are the same on every machine. Adam's epsilon is
large, because Adam otherwise turns gradients that are rounding errors into whole steps.

`--compare` writes each float as hexadecimal text, and more of them than expected.json has. The outputs of two versions
of the code on one machine are equal if and only if both compute the same bits:

    PYTHONPATH=. python tests/golden/make_first_house.py --compare > before.json
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from shlex import split as words
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from transformer_xl.cli.main import main as command

GOLDEN = Path(__file__).parent / "first_house"
COMMON = words(
    "--corpus.name text --model.n-layer 2 --model.d-model 16 --model.n-head 2 --model.d-head 8 --model.d-inner 24"
    " --model.init-std 0.3 --model.proj-init-std 0.3 --model.dropout 0.1 --train.batch-size 4 --train.tgt-len 8"
    " --train.mem-len 12 --train.max-steps 8 --train.log-every 1 --train.eval-every 4 --train.save-every 4"
    " --train.sample-every 0 --train.precision fp32 --train.device cpu --train.lr 0.02 --train.warmup-steps 2"
    " --train.clip 1 --train.epsilon 1e-6 --train.eval-tokens 64 --eval.batch-size 4 --eval.tgt-len 8 --eval.mem-len 12"
    " --eval.max-tokens 192"
)
BANDS = "--corpus.unit word --corpus.min-count 2 --model.cutoffs 10 40 --model.d-embed 12"
RUNS = {
    "xl": f"{BANDS} --model.div-val 2 --model.tie-projs false true true --model.untie-r --model.dropatt 0.1"
    " --train.optimizer adam --train.schedule constant --train.average-from 2 --train.clamp-len 10",
    "original": f"{BANDS} --model.tie-projs true false true --train.optimizer sgd --train.momentum 0.9 --train.lr 0.2"
    " --train.schedule inv_sqrt --train.attn-len 12 --corpus.newlines sentence",
    "muon": "--train.optimizer muon --train.lr 0.01 --train.momentum 0.9 --train.embedding-lr-ratio 0.5"
    " --train.weight-decay 0.1 --model.tie-weight false --train.min-lr-ratio 0.1",
    "ptb": "--corpus.unit word --corpus.min-count 2 --model.share-position-projection --model.locked-dropout"
    " --model.dropatt 0.1 --model.dropout-words 0.1 --model.dropout-input 0.2 --model.dropout-output 0.3"
    " --train.mem-len 0 --train.context-len 8 --train.random-tgt-len --train.weight-decay 1e-3"
    " --train.embedding-lr-ratio 2 --train.ar-alpha 0.2 --train.tar-beta 0.1 --eval.mem-len 0 --eval.context-len 6",
    "zero": "--corpus.unit char --model.zero-memory --model.pre-lnorm --model.final-norm --train.optimizer adamw"
    " --train.weight-decay 0.1 --train.batch-chunk 2 --train.mem-len 60 --eval.mem-len 60",
    "shaw": "--model.kind shaw --model.positions 10 --corpus.shuffle-lines",
    "vaswani": "--model.kind vaswani --model.dropatt 0.1",
    "al-rfou": "--model.kind al-rfou --model.positions 8 --model.intermediate-losses --model.multiple-targets"
    " --train.mem-len 0 --eval.mem-len 0 --train.loss half --train.optimizer sgd --train.momentum 0.9",
    "lstm": "--model.kind lstm --corpus.unit word --corpus.min-count 2 --model.weight-drop 0.2 --train.tar-beta 0.5",
    "qrnn": "--model.kind qrnn --corpus.unit char --model.weight-drop 0.2 --train.average-from 2"
    " --train.schedule constant",
    "documents": "--corpus.name documents --corpus.reset-documents --train.optimizer adamw",
}
"""Each run, and its settings beyond `COMMON`."""
ATTENTION_ONLY = {"--model.n-head", "--model.d-head", "--model.init-std"}
"""Options of `COMMON` that recurrent networks have no use for."""
WRITING, INITIAL = ("xl", "zero", "shaw", "qrnn"), ("xl", "qrnn")
"""Runs that write text, and runs whose weights other runs start from."""
SAVED, LAST = 4, 8
"""The steps after which the golden checkpoints were saved, and after which resumed runs end."""
ON_CPU = ["--device", "cpu", "--precision", "fp32"]
PROMPT = "ba"


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Run commands in `folder`, with a cache of its own."""
    with chdir(folder), patch.dict(os.environ, TXL_HOME=str(folder / "cache")):
        yield


def copied(folder: Path) -> Path:
    """A copy of the golden folder at `folder`, with the exported code beside the exported weights."""
    shutil.copytree(GOLDEN, folder)
    with zipfile.ZipFile(folder / "huggingface/code.zip") as code:
        code.extractall(folder / "huggingface")
    return folder


def txl(*arguments: str) -> str:
    """Run a command in this process, and return what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = command(list(arguments))
    assert status == 0, f"txl {' '.join(arguments)}: {err.getvalue()}"
    return out.getvalue()


def checkpoint(name: str, step: int = SAVED) -> str:
    """A checkpoint of a run, from the golden folder."""
    return f"trained/{name}/checkpoints/step_{step:08d}"


def losses(run: str) -> list[dict[str, float]]:
    """Step, loss and gradient norm of each training step that a run logged."""
    lines = map(json.loads, Path(run, "metrics.jsonl").read_text("utf-8").splitlines())
    return [{key: x[key] for key in ("step", "loss", "grad_norm", "lr")} for x in lines if x.get("split") == "train"]


def evaluation(folder: str, *options: str) -> dict[str, Any]:
    """Targets and nats of the test split, and log-probabilities of its targets."""
    dump = Path("dump.npz")
    [result] = json.loads(txl("eval", folder, "--json", "--dump", str(dump), *ON_CPU, *options))["results"]
    with np.load(dump) as stored:
        values = next(stored[name] for name in stored.files if stored[name].dtype.kind == "f")
    dump.unlink()
    return {"targets": result["targets"], "nats": result["nats"], "log_probs": values.tolist()}


def text(name: str) -> str:
    """What the checkpoint of a run writes after `PROMPT`."""
    how = ["--prompt", PROMPT, "--json", "--max-tokens", "12", "--seed", "5", *ON_CPU]
    return json.loads(txl("generate", checkpoint(name), *how))["text"]


def resumption(name: str) -> dict[str, Any]:
    """The steps after `txl train --resume` of a copy, and the validation and test results at their end."""
    run = f"trained/{name}-resumed"
    shutil.copytree(f"trained/{name}", run)
    txl("train", f"{run}/config.toml", "--out", run, "--resume")
    lines = map(json.loads, Path(run, "metrics.jsonl").read_text("utf-8").splitlines())
    results = [{"split": x["split"], "nats": x["nats"]} for x in lines if "nats" in x and x["step"] == LAST]
    return {"steps": [step for step in losses(run) if step["step"] > SAVED], "results": results}


def initialised(name: str) -> list[dict[str, float]]:
    """The first steps of a run that starts from the weights of a checkpoint."""
    new = f"trained/from-{name}"
    few = words("--train.max-steps 2 --train.eval-tokens 32 --eval.max-tokens 32 --train.average-from 0")
    txl("train", f"trained/{name}/config.toml", "--init", checkpoint(name), "--out", new, *few)
    return losses(new)


def sequence(vocab_size: int) -> torch.Tensor:
    """Ids [2, 30], the same on every machine."""
    return (torch.arange(60).view(2, 30) * 7 + 3) % vocab_size


def exported(folder: str = "huggingface", owner: Any = None) -> list[list[float]]:
    """Log-probabilities that an exported folder gives every id, read with the memory in two calls.

    `owner` loads it; by default it is what transformers chooses after `import transformer_xl.hf`.
    """
    import transformers
    from transformers import AutoModelForCausalLM

    import transformer_xl.hf  # noqa: F401  registers the classes

    transformers.utils.logging.disable_progress_bar()
    model = (owner or AutoModelForCausalLM).from_pretrained(folder)
    ids = sequence(model.config.vocab_size)
    with torch.no_grad():
        first = model(ids[:, :17])
        second = model(ids[:, 17:], past_key_values=first.past_key_values)
    return torch.cat([first.logits, second.logits], 1).flatten(0, 1).tolist()


def imported() -> dict[str, Any]:
    """What checkpoints give that `txl convert` made of the exported folder and of the one in the original format."""
    txl("convert", "huggingface", "--from", "huggingface", "--to", "from_huggingface")
    txl("convert", "original", "--from", "original", "--to", "from_original")
    return {
        "huggingface": evaluation("from_huggingface"),
        "original": evaluation("from_original", "--data", "text", "--split", "test"),
    }


def measure(name: str) -> dict[str, Any]:
    """All numbers of one run; the working folder is a copy of the golden one."""
    numbers = {"evaluation": evaluation(checkpoint(name)), "resumption": resumption(name)}
    numbers |= {"text": text(name)} if name in WRITING else {}
    return numbers | ({"initialised": initialised(name)} if name in INITIAL else {})


def write_texts(folder: Path) -> None:
    """Both texts: lines of words, of which few are frequent and many rare."""
    draw = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    vocabulary = [draw.choice(syllables) + draw.choice(["", *syllables]) for _ in range(90)]
    shares = [1 / (rank + 2) for rank in range(len(vocabulary))]

    def line() -> str:
        return " ".join(draw.choices(vocabulary, shares, k=draw.randint(3, 14))) + " .\n"

    for split, size, documents in (("train", 12_000, 16), ("valid", 1_500, 3), ("test", 1_500, 3)):
        lines = ""
        while len(lines) < size:
            lines += line()
        (folder / "text").mkdir(exist_ok=True)
        (folder / "text" / f"{split}.txt").write_text(lines, "utf-8")
        (folder / "documents" / split).mkdir(parents=True)
        for number in range(documents):
            (folder / "documents" / split / f"{number:02}.txt").write_text(line(), "utf-8")


def moment_owners(name: str) -> dict[str, str]:
    """Which weight each stored moment belongs to: the first house numbered them as its optimizers did."""
    from transformer_xl.checkpoint import load_model
    from transformer_xl.train.optim import build_optimizers

    loaded = load_model(checkpoint(name))
    names = {parameter: owner for owner, parameter in loaded.model.named_parameters()}
    return {
        f"optimizer.{which}.{index}": names[parameter]
        for which, optimizer in enumerate(build_optimizers(loaded.model, loaded.config.train))
        for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }


def train(name: str) -> None:
    """Train a run, and leave it as it was after step `SAVED`: a process that was killed then leaves the same."""
    run, settings = Path("trained", name), words(RUNS[name])
    pairs = dict(zip(COMMON[::2], COMMON[1::2], strict=True))
    recurrent = name in ("lstm", "qrnn")
    common = [word for pair in pairs.items() if not (recurrent and pair[0] in ATTENTION_ONLY) for word in pair]
    recipe = Path("empty.toml")
    recipe.touch()
    txl("train", str(recipe), "--out", str(run), *common, *settings)
    recipe.unlink()
    shutil.rmtree(checkpoint(name, LAST))
    for file, later in (("metrics.jsonl", f'"step": {SAVED + 1}'), ("log.txt", f"step {SAVED + 1}/")):
        whole = (run / file).read_text("utf-8").splitlines(keepends=True)
        end = next(number for number, line in enumerate(whole) if later in line)
        (run / file).write_text("".join(whole[:end]), "utf-8")
    for path in run.iterdir():
        if path.name not in ("checkpoints", "config.toml", "environment.json", "metrics.jsonl", "log.txt"):
            path.unlink()


def make() -> None:
    """Write the golden folder."""
    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.mkdir()
    write_texts(GOLDEN)
    owners: dict[str, Any] = {}
    with working_in(GOLDEN):
        for name in RUNS:
            train(name)
            owners[name] = moment_owners(name)
        txl("convert", checkpoint("xl"), "--to-format", "huggingface", "--to", "huggingface")
        txl("convert", checkpoint("original"), "--to-format", "original", "--to", "original")
        shutil.rmtree("cache")
        with zipfile.ZipFile("huggingface/code.zip", "w") as code:
            for path in sorted(Path("huggingface").glob("*.py")):
                code.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
                path.unlink()
    measured = everything()
    for name, run in measured["runs"].items():
        run["owners"] = owners[name]
    (GOLDEN / "expected.json").write_text(json.dumps(few_numbers(measured), indent=1) + "\n", "utf-8")


def everything() -> dict[str, Any]:
    """All numbers of all golden folders, from the code at hand."""
    with tempfile.TemporaryDirectory() as place, working_in(copied(Path(place).resolve() / "house")):
        return {"runs": {name: measure(name) for name in RUNS}, "exported": exported(), "imported": imported()}


def few_numbers(value: Any) -> Any:
    """`value`, of whose lists at most 12 entries stay, at equal distances."""
    if isinstance(value, Mapping):
        return {key: few_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [few_numbers(each) for each in value[:: max(-(-len(value) // 12), 1)]]
    return value


def exact(value: Any) -> Any:
    """`value` with each float as hexadecimal text."""
    if isinstance(value, Mapping):
        return {key: exact(each) for key, each in value.items()}
    if isinstance(value, list):
        return [exact(each) for each in value]
    return value.hex() if isinstance(value, float) else value


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] == ["--compare"]:
        print(json.dumps(exact(everything()), indent=1))
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        make()
