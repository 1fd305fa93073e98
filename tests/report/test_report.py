"""The page of a run: its figures are true, it keeps every extreme, and it escapes every text of a file."""

from __future__ import annotations

import json
import math
import os
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from shlex import split as words
from typing import Any

import numpy as np
import pytest
import torch
from amount import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from transformer_xl.commands.main import main
from transformer_xl.config.recipe import load_recipe, unsaid, write_toml
from transformer_xl.config.settings import RunConfig
from transformer_xl.data.datasets import open_corpus
from transformer_xl.model.baselines import build_model
from transformer_xl.report.curves import HEIGHT, WIDTH, Axis, Series, chart, thin
from transformer_xl.report.figures import READ, TARGETS, complete_figures, identity, stored_figures, texts_of
from transformer_xl.report.page import NATS, legend, level
from transformer_xl.report.record import read_run
from transformer_xl.run.checkpoint import load_model, save_checkpoint
from transformer_xl.run.folder import Run, find_checkpoint
from transformer_xl.train.choices import resolve_settings

pytestmark = pytest.mark.usefixtures("own_folder")
VOID = {"img", "meta", "br"}
EVIL = "</title></style><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


class Page(HTMLParser):
    """A page as a browser parses it: its elements and its text. Every element must be closed in its place."""

    def __init__(self, source: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.open = "", []
        self.feed(source)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += f"{data} "

    def values(self, name: str) -> list[str]:
        """The values of an attribute."""
        return [attrs[name] or "" for _, attrs in self.elements if name in attrs]


def page_of(*runs: Path, options: Sequence[str] = ()) -> Page:
    assert main(["report", *map(str, runs), "--out", "page.html", *options]) == 0
    return Page(Path("page.html").read_text("utf-8"))


def line(step: int, loss: float | None, **more: Any) -> dict[str, Any]:
    """An entry of training, at 7 steps a second and 66 tokens a step."""
    figures = {"grad_norm": 0.5, "skipped": 0, "tokens_per_second": 462.0, "lr": 0.01, "seconds": step / 7}
    return {"step": step, "split": "train", "loss": loss, **figures, **more}


def scored(step: int, loss: float | None, split: str = "valid", **more: Any) -> dict[str, Any]:
    """An entry of an evaluation."""
    about = {"step": step, "split": split, "corpus": "some text", "unit": "byte", "targets": 1234, "seconds": 0.5}
    return {**about, "loss": loss, "tgt_len": 6, "mem_len": 6, "clamp_len": None, "attn_len": None, **more}


def make_run(folder: Path, entries=None, *, device: str = "cpu", recipe: str = "enwik8-small", **train: Any) -> Path:
    """A run folder as `txl train` leaves it, without checkpoints."""
    folder.mkdir(parents=True)
    config = load_recipe("enwik8-small", words("--eval.tgt-len 6 --eval.mem-len 6"))
    sizes = {"max_steps": 20, "batch_size": 11, "tgt_len": 6, "mem_len": 6, "device": device, "precision": "fp32"}
    Run(folder).write_settings(replace(config, train=replace(config.train, **sizes | train)))
    facts = {"python": "3.11", "devices": ["an EPYC", "a T4", "an H200"], "packages": {"torch": "2"}, "recipe": recipe}
    (folder / "environment.json").write_text(json.dumps(facts))
    usual = [line(10, 2.0), scored(10, 1.75), line(20, 1.5), scored(20, 1.5), scored(20, 1.25, "test")]
    entries = usual if entries is None else entries
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder


@pytest.mark.parametrize(
    ("device", "machine"), [("cpu", "an EPYC"), ("cuda", "a T4"), ("cuda:0", "a T4"), ("cuda:1", "an H200")]
)
def test_a_page_shows_the_main_figures_and_the_machine_of_the_training(tmp_path, device, machine):
    seen = page_of(make_run(tmp_path / "mine", device=device)).text
    for part in ("mine", f"{1.25 / math.log(2):.4f} bpc", "1,320", "20 of 20", "0:03"):
        assert part in seen, part
    assert f"Transformer-XL, 6 layers of 192, 3 heads, on enwik8 (bytes); trained on {machine}, fp32" in seen


def test_a_run_of_a_row_of_the_paper_stands_in_its_table(tmp_path):
    found = []
    for name, change in {"mine": "", "half": "--train.loss half", "short": "--train.tgt-len 8"}.items():
        run = make_run(tmp_path / name, recipe="enwik8-12l")
        Run(run).write_settings(load_recipe("enwik8-12l", words(change), note=unsaid))
        found.append(page_of(run).text)
    seen, *others = found
    assert "Table 2 of the paper: enwik8, test" in seen and "0.99" in seen
    assert seen.count(f"{1.25 / math.log(2):.4f} bpc") == 3, "the head, the evaluations and the table"
    assert not any("of the paper" in other for other in others)


def test_tokens_are_counted_from_speeds_and_times_and_parameters_in_the_checkpoint(tmp_path):
    from safetensors.numpy import save_file

    run = make_run(tmp_path / "a", [line(10, 2.0), line(20, 1.5, tokens_per_second=231.0, skipped=5)])
    folder = Run(run).checkpoint(10)
    folder.mkdir(parents=True)
    save_file({"a": np.zeros((3, 5)), "b": np.zeros(7), "c": np.zeros(())}, folder / "model.safetensors")
    record = read_run(run, "a")
    assert record.tokens(np.array([0.0, 10, 15, 20])).tolist() == [0, 660, 825, 990] and record.parameters == 23


def test_every_text_of_a_file_is_escaped(tmp_path):
    """The elements of a page do not depend on its texts."""
    pages = {}
    for word in ("plain", EVIL):
        entries = [line(10, 1.0), scored(10, 1.0, split=word, mem_len=word), {"step": 10, "sample": f"{word}\n{word}"}]
        run = make_run(tmp_path / re.sub(r"\W", "", word) / word.replace("/", ""), entries)
        (run / "environment.json").write_text(json.dumps({word: word, "init": word, "cores": word}))
        (run / "attention").mkdir()
        (run / "attention" / f"{word.replace('/', '')}.png").write_bytes(
            b"\x89PNG\r\n\x1a\n<svg><script>alert(1)</script></svg>"
        )
        pages[word] = page_of(run)
    plain, evil = (pages[word].elements for word in ("plain", EVIL))
    assert [(tag, sorted(attrs)) for tag, attrs in evil] == [(tag, sorted(attrs)) for tag, attrs in plain]
    assert not {"script", "iframe", "object", "link"} & {tag for tag, _ in evil}
    assert not any(name.startswith("on") for _, attrs in evil for name in attrs)
    assert pages[EVIL].text.count("<script>alert(1)") >= 6  # shown as text
    assert [source[:22] for source in pages[EVIL].values("src")] == ["data:image/png;base64,"]
    assert pages[EVIL].values("content")[0].startswith("default-src 'none'")


@pytest.mark.parametrize(
    ("entries", "sentences"),
    [
        ([], ["There are no figures yet."]),
        ([line(10, 2.0)], ["not ended: this is its state after step 10 of 20"]),
        ([line(20, 2.0)], ["There is no test figure"]),
        ([line(5, 2.0), line(10, None, skipped=5, grad_norm=None), line(20, 1.5), scored(20, None, "test")],
         ["1 of 3 lines", "5 steps were skipped", "test loss is not finite", "not finite"]),
    ],
)  # fmt: skip
def test_what_is_unfinished_or_not_finite_is_reported(tmp_path, entries, sentences):
    seen = page_of(make_run(tmp_path / "mine", entries)).text
    for sentence in sentences:
        assert sentence in seen, sentence


def test_samples_keep_their_lines_and_steps(tmp_path):
    """Samples are entries of the metrics. They are not evaluations and not in the curves."""
    texts = [(step, f"one <{step}>\n\ntwo\n") for step in range(5, 20)]
    run = make_run(tmp_path / "mine", [line(10, 2.0), *({"step": step, "sample": text} for step, text in texts)])
    record = read_run(run, "mine")
    assert not record.evaluations and record.train["step"].tolist() == [10]
    seen = page_of(run).text
    for part in ("after step 19", "one <19>\n\ntwo\n", "14 earlier samples", "After step 5"):
        assert part in seen, part


def test_the_test_figure_is_measured_at_the_settings_lengths(tmp_path):
    asked = scored(20, 1.25, "test")
    others = [scored(20, 1.125, "test", mem_len=12), scored(20, 1.5, "test", mem_len=0)]
    for entries in ([asked, *others], [*others, asked]):
        assert read_run(make_run(tmp_path / entries[0]["loss"].hex(), entries), "mine").test_entry == asked


@pytest.mark.parametrize("changed", [{"targets": 99}, {"mem_len": 0}])
def test_validations_of_other_targets_or_lengths_are_not_compared(tmp_path, changed):
    entries = [scored(10, 1.0), scored(20, 2.0, **changed), scored(30, 3.0, **changed), scored(40, 0.5, "test")]
    best = read_run(make_run(tmp_path / "mine", entries), "mine").best_valid
    assert best is not None and best["step"] == 20


def test_several_runs_are_compared(tmp_path):
    runs = [make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run", lr=0.125), make_run(tmp_path / "c")]
    seen = page_of(*runs)
    assert re.search(r"train\.lr\s+[\d.e-]+\s+0\.125", seen.text)
    for part in ("3 runs side by side", "a/run", "b/run"):
        assert part in seen.text, part
    assert any("a/run valid from" in label for label in seen.values("aria-label"))
    settings = Run(runs[2]).settings()
    Run(runs[2]).write_settings(replace(settings, eval=replace(settings.eval, split="valid")))
    assert "test or valid" in (text := page_of(*runs).text) and " bpc (test)" in text and "(valid)" in text


def test_settings_that_differ_from_the_recipe_come_first(tmp_path):
    seen = page_of(make_run(tmp_path / "mine", backend="strided")).text
    assert "The recipe is enwik8-small." in seen and re.search(r"train\.max_steps\s+20\s+\d{3}", seen)
    assert not re.search(r"train\.backend\s+strided\s+auto", seen), "the recipe leaves it open"
    assert "does not name a packaged recipe" in page_of(make_run(tmp_path / "own", recipe="mine.toml")).text


def test_the_page_is_written_into_the_run_or_the_current_folder(tmp_path, capsys):
    one, _ = (make_run(tmp_path / name) for name in ("one", "two"))
    (one / "attention").mkdir()
    (one / "attention" / "average.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    os.mkfifo(one / "attention" / "a_pipe.png")
    (tmp_path / "private.png").write_bytes(b"\x89PNG\r\n\x1a\nprivate")
    (one / "attention" / "a_link.png").symlink_to(tmp_path / "private.png")
    assert main(["report", "one"]) == main(["report", "one", "two"]) == 0
    assert "Report: one/report.html" in capsys.readouterr().out
    source = (one / "report.html").read_text("utf-8")
    assert "one: attention/average" in Page(source).text and Path("report.html").exists()
    [source_of_picture] = page_of(one).values("src")  # no pipe, and no link to what is outside
    assert source_of_picture.startswith("data:image/png;base64,")
    assert Path("page.html").read_text("utf-8") == source, "the same files give the same page"


ODD = st.recursive(
    st.sampled_from([None, True, -1, 1e300, 10**4000, "x", "\x1b[31m"]),
    lambda one: st.lists(one) | st.dictionaries(st.text(max_size=3), one),
    max_leaves=3,
)


@settings(max_examples=examples(60))
@given(file=st.sampled_from(["metrics.jsonl", "environment.json", "report.json"]), data=st.data())
@example(file="metrics.jsonl", data="[" * 100_000)
@example(file="report.json", data="[1]")
def test_odd_values_in_a_runs_files_end_in_a_page_or_a_sentence(tmp_path, capsys, file, data):
    names = words("step split loss checkpoint corpus devices figures sum mem_len sample seconds")
    run = make_run(tmp_path / uuid.uuid4().hex)
    if not isinstance(data, str):
        data = json.dumps(data.draw(ODD | st.dictionaries(st.sampled_from(names), ODD)))
    with (run / file).open("a" if file == "metrics.jsonl" else "w") as opened:
        opened.write(data + "\n")
    assert main(["report", str(run)]) in (0, 2)
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err and "Traceback" not in err


@pytest.mark.unchecked
def test_a_long_run_makes_a_small_page_quickly(tmp_path):
    """A page of 20,000 lines takes 0.2 seconds; the limit allows for a busy machine."""
    entries = [line(step, 2 + math.sin(step)) for step in range(1, 20_001)] + [scored(20_000, 1.0)]
    entries[12_345]["loss"] = 7.0  # one spike, which must be visible
    run = make_run(tmp_path / "long", entries, max_steps=20_000)
    begun = time.process_time()
    seen = page_of(run)
    assert time.process_time() - begun < 4
    paths = [attrs["d"] or "" for tag, attrs in seen.elements if attrs.get("class") == "line c0 thin"]
    assert min(float(up) for up in re.findall(r",([\d.]+)", paths[0])) < HEIGHT / 4
    assert Path("page.html").stat().st_size < 200_000


floats = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(floats, min_size=1, max_size=200), st.integers(1, 9))
def test_thinning_keeps_the_ends_and_extremes_of_every_group(values, columns):
    y = np.array(values)
    kept = thin(y, columns)
    finite = np.flatnonzero(np.isfinite(y))
    assert set(kept) <= set(finite) and (np.diff(kept) > 0).all()
    assert len(kept) <= 4 * columns
    for group in np.array_split(finite, columns):
        drawn = np.intersect1d(group, kept)
        if len(group):
            assert y[drawn].min() == y[group].min() and y[drawn].max() == y[group].max()
            assert (drawn[0], drawn[-1]) == (group[0], group[-1])


@given(st.floats(1e-6, 1e6), st.floats(1.001, 1e6), st.booleans())
@example(3.7331, 3.7339 / 3.7331, False)
@example(999_990.0, 1_000_010 / 999_990, False)
@example(1e-4, 1.01, False)
def test_ticks_are_few_and_inside_and_their_labels_differ(low, ratio, log):
    axis = Axis(low, low * ratio, 0.0, 100.0, log)
    labels, marks = zip(*axis.ticks(6), strict=True)
    assert 2 <= len(labels) == len(set(labels)) <= 12 and [*marks] == sorted(set(marks))
    assert all(-1e-6 <= mark <= 100 + 1e-6 for mark in marks)


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.floats(0, 1e99), floats), max_size=20), st.booleans(), st.booleans())
def test_any_figures_make_a_chart_inside_its_frame(points, log, zero):
    x, y = (np.array([point[i] for point in points], dtype=float) for i in (0, 1))
    drawn = chart([Series("a", x, y, "c0", True)], "any", log=log, zero=zero and not log and bool((y >= 0).all()))
    if drawn is None:
        return
    paths = " ".join(path for path, _ in drawn.lines)
    points = [(float(a), float(b)) for a, b in re.findall(r"([-\d.einfa]+),([-\d.einfa]+)", paths)]
    points += [(a, b) for a, b, *_ in drawn.dots]
    points += [(across, drawn.y.start) for _, across in drawn.x.ticks(5)]
    points += [(drawn.x.start, up) for _, up in drawn.y.ticks(6)]
    assert len(points) > len(drawn.dots)
    for across, up in points:
        assert -0.1 <= across <= WIDTH + 0.1 and -0.1 <= up <= HEIGHT + 0.1


def test_a_missing_figure_breaks_the_line():
    y = np.array([1.0, 2, math.nan, 3, 4, math.nan, 5])
    drawn = chart([Series("a", np.arange(7.0), y, "c0")], "broken")
    assert drawn is not None
    [path] = [path for path, _ in drawn.lines]
    assert path.count("M") == 3 and path.endswith("h0")


SENTENCES = "The naïve bird <b>sang</b> & 'twice'.\n\tNo one\u00a0heard “it” — 雨が降る.\n"
SMALL = words(
    "--model.n-layer 2 --model.d-model 14 --model.d-inner 11 --train.precision fp32 --train.device cpu"
    " --train.tgt-len 31 --train.mem-len 40 --train.max-steps 10 --eval.mem-len 62 --eval.batch-size 3"
    " --model.n-head 3 --model.d-head 5"
)


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, which some CPUs have, the number of rows of a product changes its bits."""
    monkeypatch.setattr("transformer_xl.run.trained.resolve_precision", lambda *_: ("fp32", "as the test says"))


def trained(run: Path, *changes: str, step: int = 10, seed: int = 1) -> RunConfig:
    """A run whose weights are random and large, so that memory matters; its text is escaped HTML in many scripts."""
    text = run.parent / "text.txt"
    text.write_text("".join(f"{number % 7} {SENTENCES}" for number in range(150)), "utf-8")
    config = load_recipe("text-small", [*SMALL, *changes], data=text)
    corpus = open_corpus(config.corpus)
    config = resolve_settings(config, corpus)
    torch.manual_seed(seed)
    model = build_model(config.model)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    save_checkpoint(
        Run(run).checkpoint(step), model=model, vocab=corpus.vocab, config=config, step=step, valid_loss=1.0
    )
    (run / "config.toml").write_text(write_toml(config), "utf-8")
    return config


def eval_json(run: Path, options: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["eval", str(run), *words(f"--precision fp32 {options}"), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["results"]


def figures_of(run: Path) -> Any:
    complete_figures(run, "cpu")
    return stored_figures(run)


def test_the_costs_are_those_of_txl_eval(tmp_path, capsys):
    trained(tmp_path / "run")
    costs = figures_of(tmp_path / "run")["costs"]
    assert [cost["mem_len"] for cost in costs] == [0, 20, 40, 62, 80]
    results = eval_json(tmp_path / "run", f"--max-tokens {TARGETS} --mem-len 0 20 40 62 80", capsys)
    for cost, result in zip(costs, results, strict=True):
        assert cost["loss"] == pytest.approx(result["loss"], rel=1e-9) and cost["targets"] == result["targets"]
    assert len({round(cost["loss"], 6) for cost in costs}) == 5  # memory matters, so equal sums mean something
    seen = page_of(tmp_path / "run").text
    assert re.search(rf"62 \(test\)\s+{costs[3]['loss'] / math.log(2):.4f} bpc", seen) and "40 (training)" in seen


UNITS = {
    "bytes": "",
    "characters": "--corpus.unit char",
    "words": "--corpus.unit word --eval.batch-size 1",
    "byte pairs": "--corpus.unit bpe --corpus.bpe-size 300",
}


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
def test_a_page_has_the_nats_of_every_target_and_the_whole_text(tmp_path, unit, capsys):
    run = tmp_path / "run"
    trained(run, *words(unit))
    page = page_of(run)
    read = figures_of(run)["passage"]
    assert 50 < len(read["texts"]) <= READ
    short = "word" in unit or "bpe" in unit
    assert short or (len(read["texts"]) == READ and read["start"] > 62), "a long text is read after a full memory"
    first = read["start"] - 1  # the first token of the split is no target
    upto = eval_json(run, f"--batch-size 1 --max-tokens {first + len(read['texts'])}", capsys)[0]["nats"]
    before = eval_json(run, f"--batch-size 1 --max-tokens {first}", capsys)[0]["nats"] if first else 0.0
    total = sum(cost or 0 for cost in read["nats"])
    assert total == pytest.approx(upto - before, rel=1e-5)
    titles = [attrs["title"] or "" for tag, attrs in page.elements if tag == "span" and "title" in attrs]
    shown = [float(match[1]) for title in titles if (match := re.match(r"([\d.]+) nats.*, probability ", title))]
    assert len(shown) == len(titles)
    assert sum(shown) == pytest.approx(total, abs=5e-4 * len(shown))
    text = "".join(read["texts"]).strip("\ufffd")
    assert " ".join(text.split()) in " ".join((tmp_path / "text.txt").read_text("utf-8").split())


LSTM = "--model.kind lstm --model.pre-lnorm false --model.final-norm false --model.n-head 10 --model.d-head 50"
KINDS = {
    "lstm": (LSTM, 2),
    "al-rfou": ("--model.kind al-rfou --model.positions 31 --train.mem-len 0 --eval.mem-len 0", 1),
    "context read again": ("--train.mem-len 0 --train.context-len 7 --eval.context-len 7 --eval.mem-len 0", 1),
    "limited attention": ("--train.attn-len 33 --eval.attn-len 33", 5),
}


@pytest.mark.parametrize("kind", KINDS, ids=KINDS)
def test_every_kind_of_model_gets_a_page(tmp_path, kind, capsys):
    changes, points = KINDS[kind]
    trained(tmp_path / "run", *words(changes))
    page = page_of(tmp_path / "run")
    assert "lacks" not in capsys.readouterr().err
    assert len(figures_of(tmp_path / "run")["costs"]) == points
    assert "Memory length" in page.text and "run reads tokens" in page.text


def test_figures_of_another_checkpoint_are_not_shown_and_are_computed_again(tmp_path, capsys):
    run = tmp_path / "run"
    trained(run)
    old = figures_of(run)
    trained(run, step=20, seed=2)  # the later checkpoint wins a tie
    page = page_of(run, options=["--no-model"])
    assert "that need the model are missing" in page.text and "Text, token by token" not in page.text
    capsys.readouterr()
    page = page_of(run)
    assert "Computing the figures" in capsys.readouterr().err and "missing" not in page.text
    new = stored_figures(run)
    assert new and new["checkpoint"] == identity(find_checkpoint(run)) != old["checkpoint"]
    assert new["costs"] != old["costs"]
    page_of(run)
    assert "Computing" not in capsys.readouterr().err
    (run / "report.json").write_text("damaged")
    page_of(run)
    assert "Computing" in capsys.readouterr().err and stored_figures(run) == new
    trained(run, step=20, seed=3)  # the same name with other weights
    assert stored_figures(run) is None


def test_a_missing_text_leaves_the_rest_of_the_page(tmp_path, capsys):
    trained(tmp_path / "run")
    (tmp_path / "text.txt").unlink()
    assert "figures of the best checkpoint that need the model are missing" in page_of(tmp_path / "run").text
    assert "lacks the figures that need the model" in capsys.readouterr().err


@pytest.mark.parametrize("nats", [math.nan, math.inf, 0.0, 1e-12, 800.0])
def test_any_cost_has_a_colour(nats):
    assert 0 <= level(nats) <= len(NATS)
    assert len(legend()) == len(NATS) + 1 and all(low < high for low, high in pairwise(NATS))


def test_a_character_of_several_tokens_is_one_piece(tmp_path):
    trained(tmp_path / "run")
    vocab = load_model(tmp_path / "run").vocab
    ids = vocab.encode("a雨b").tolist()
    assert texts_of(vocab, vocab.encode("x").tolist(), ids) == ["a", "", "", "雨", "b"]
    assert "".join(texts_of(vocab, vocab.encode("x").tolist(), ids[:3])) == "a\ufffd"
