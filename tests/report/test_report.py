"""A run's page is right whatever its folder lacks, keeps every extreme, and escapes every text of a file."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.cli.journeys import report as journey
from transformer_xl.cli.journeys.report import names
from transformer_xl.cli.options.analyse import Report
from transformer_xl.config.recipe import load_recipe, write_toml
from transformer_xl.report import paper
from transformer_xl.report.curves import Series, chart, thin, ticks
from transformer_xl.report.record import read_run

VOID = {"img", "meta", "br"}
EVIL = "</title></style><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x00\ud800"


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

    def titles(self) -> str:
        return " ".join(
            value or "" for _, attrs in self.elements for name, value in attrs.items() if name == "aria-label"
        )


def line(step: int, loss: float | None, **more: Any) -> dict[str, Any]:
    """An entry of training, at 7 steps a second and 66 tokens a step."""
    figures = {"grad_norm": 0.5, "skipped": 0, "tokens_per_second": 462.0, "lr": 0.01, "seconds": step / 7}
    return {"step": step, "split": "train", "loss": loss, **figures, **more}


def scored(step: int, loss: float | None, split: str = "valid", **more: Any) -> dict[str, Any]:
    """An entry of an evaluation."""
    about = {"step": step, "split": split, "corpus": "some text", "unit": "byte", "targets": 1234, "seconds": 0.5}
    return {**about, "loss": loss, "tgt_len": 6, "mem_len": 6, "clamp_len": None, "attn_len": None, **more}


def make_run(folder: Path, entries=None, log: str = "", recipe: str = "enwik8-small", **changes: str) -> Path:
    """A run folder as `txl train` leaves it; `changes` replace lines of config.toml."""
    folder.mkdir(parents=True)
    config = write_toml(load_recipe(recipe))
    for name, value in {"max_steps": "20", "batch_size": "11", "tgt_len": "6", "mem_len": "6", **changes}.items():
        config = re.sub(rf"^{name} = .*$", lambda _: f"{name} = {value}", config, flags=re.M)  # noqa: B023
    (folder / "config.toml").write_text(config)
    facts = {"python": "3.11", "cores": 2, "system": "Linux", "devices": ["cpu"], "packages": {"torch": "2"}}
    (folder / "environment.json").write_text(json.dumps(facts))
    usual = [line(10, 2.0), scored(10, 1.75), line(20, 1.5), scored(20, 1.5), scored(20, 1.25, "test")]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries or usual))
    (folder / "log.txt").write_text("2.93M parameters on some text, 9 tokens\n" + log, encoding="utf-8")
    return folder


def report(runs: Sequence[Path], out: Path | None = None, **options: Any) -> Path:
    return journey.report(Report(tuple(runs), out, **options))


def page_of(*runs: Path, **options: Any) -> Page:
    out = runs[0].parent / "page.html"
    assert report(runs, out, **options) == out
    return Page(out.read_text("utf-8"))


def test_a_page_shows_the_main_figures(tmp_path):
    seen = page_of(make_run(tmp_path / "mine"), title="My run").text
    for words in ("My run", f"{1.25 / math.log(2):.4f}", "2.93M", "1,320", "some text", "20 planned"):
        assert words in seen, words


def test_tokens_are_counted_from_speeds_and_times(tmp_path):
    entries = [line(10, 2.0), line(20, 1.5, tokens_per_second=231.0, skipped=5)]
    record = read_run(make_run(tmp_path / "a", entries), "a")
    assert record.tokens(np.array([0.0, 10, 15, 20])).tolist() == [0, 660, 825, 990]
    entries[0]["seconds"] = None
    record = read_run(make_run(tmp_path / "b", entries), "b")
    assert record.tokens(np.array([10.0])).tolist() == [660]  # planned: 11 streams of 6


def test_parameters_are_counted_in_the_checkpoint(tmp_path):
    from safetensors.numpy import save_file

    run = make_run(tmp_path / "mine")
    for step, loss in ((10, 1.0), (20, 2.0)):
        folder = run / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        save_file({"a": np.zeros((3, 5)), "b": np.zeros(7), "c": np.zeros(())}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"step": step, "valid_loss": loss}))
    record = read_run(run, "mine")
    assert (record.parameters, record.best_step) == (23, 10)


def test_every_text_of_a_file_is_escaped(tmp_path):
    """The elements of a page do not depend on what its texts say."""
    pages = {}
    for words in ("plain", EVIL):
        stored = words.replace("\x00", "").replace("\ud800", "")
        entries = [line(10, 1.0), scored(10, 1.0, corpus=words, partial=words, split=words, unit=words, mem_len=words)]
        entries.append({"step": 10, "sample": f"{words}\n{words}"})
        run = make_run(tmp_path / re.sub(r"\W", "", words) / stored.replace("/", ""), entries)
        config = (run / "config.toml").read_text()
        (run / "config.toml").write_text(config.replace('name = "enwik8"', f"name = {json.dumps(stored)}"), "utf-8")
        (run / "environment.json").write_text(json.dumps({words: words, "init": words, "cores": words}))
        (run / "analysis").mkdir()
        (run / "analysis" / "map.svg").write_text("<svg><script>alert(1)</script></svg>")
        (run / "analysis" / "map.json").write_text(json.dumps({"caption": words}))
        pages[words] = page_of(run, title=words)
    plain, evil = (pages[words].elements for words in ("plain", EVIL))
    assert [(tag, sorted(attrs)) for tag, attrs in evil] == [(tag, sorted(attrs)) for tag, attrs in plain]
    assert not {"script", "iframe", "object", "link"} & {tag for tag, _ in evil}
    assert not any(name.startswith("on") for _, attrs in evil for name in attrs)
    assert pages[EVIL].text.count("<script>alert(1)</script>") >= 8  # shown as text
    assert [attrs["src"][:26] for tag, attrs in evil if tag == "img"] == ["data:image/svg+xml;base64,"]
    policy = next(attrs["content"] for tag, attrs in evil if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


@pytest.mark.parametrize("missing", ["config.toml", "environment.json", "metrics.jsonl", "log.txt"])
@pytest.mark.parametrize("damage", [None, b"\xff\x00{", b"[1, 2]\n[3]\n", b"null\nnull\n", b""])
def test_the_page_names_a_missing_file_and_bears_a_damaged_one(tmp_path, missing, damage):
    run = make_run(tmp_path / "mine")
    if damage is None:
        (run / missing).unlink()
        assert f"{missing} is missing." in page_of(run).text
    else:
        (run / missing).write_bytes(damage)
        page_of(run)


def test_senseless_settings_and_figures_still_make_a_page(tmp_path):
    strange = [line(10, 2.0, seconds=None, tokens_per_second="x"), scored(10, None), {"step": "x"}, {"step": 10**400}]
    page_of(make_run(tmp_path / "mine", strange, max_steps='"many"', batch_size="[1]", clip='"x"', device="3"))


def test_a_run_that_has_not_ended_has_no_test_figure(tmp_path):
    going = page_of(make_run(tmp_path / "going", [line(10, 2.0)]))
    assert "not ended: this is its state after step 10 of 20" in going.text
    ended = page_of(make_run(tmp_path / "ended", [line(10, 2.0), line(20, 2.0)]))
    assert "There is no test figure" in ended.text
    empty = make_run(tmp_path / "empty")
    (empty / "metrics.jsonl").write_text("")
    assert "There are no figures yet." in page_of(empty).text


def test_figures_that_are_not_finite_are_reported_and_marked(tmp_path):
    entries = [line(5, 2.0), line(10, None, skipped=5, grad_norm=None), line(20, 1.5), scored(20, None, "test")]
    seen = page_of(make_run(tmp_path / "mine", entries))
    for words in ("1 of 3 lines", "5 steps were skipped", "test loss is not finite", "not finite"):
        assert words in seen.text, words
    assert sum(attrs.get("class") == "lost" for _, attrs in seen.elements) == 3  # both losses, and the norm


def test_resuming_and_partial_corpora_are_reported(tmp_path):
    log = "step 10/20  loss\nStopped by a signal, and saved. Go on\n2.93M parameters on some text\n"
    entries = [line(20, 1.0), scored(20, 1.0, "test", partial="the first half")]
    seen = page_of(make_run(tmp_path / "mine", entries, log)).text
    for words in ("resumed: training began 2 times", "partial: the first half"):
        assert words in seen, words


def test_samples_keep_their_lines_and_steps(tmp_path):
    """Samples are entries of the metrics. They are not evaluations and not in the curves."""
    texts = [(step, f"one <{step}>\n\ntwo\n") for step in range(5, 20)]
    entries = [line(10, 2.0), *({"step": step, "sample": text} for step, text in texts)]
    run = make_run(tmp_path / "mine", entries, log="step 5/20  loss\nsample: only in the log\n")
    record = read_run(run, "mine")
    assert [tuple(sample) for sample in record.samples] == texts
    assert not record.evaluations and record.train["step"].tolist() == [10]
    seen = page_of(run).text
    for words in ("After step 19", "one <19>\n\ntwo\n", "8 of 14 earlier ones", "After step 5"):
        assert words in seen, words
    assert "only in the log" not in seen


def test_the_test_figure_is_measured_at_the_settings_lengths(tmp_path):
    asked = scored(20, 1.25, "test")
    others = [scored(20, 1.125, "test", mem_len=12), scored(20, 1.5, "test", mem_len=0)]
    for entries in ([asked, *others], [*others, asked]):
        record = read_run(make_run(tmp_path / str(entries is None) / entries[0]["loss"].hex(), entries), "mine")
        assert record.tested == asked


def test_a_run_of_another_shape_is_no_reproduction(tmp_path):
    small = page_of(make_run(tmp_path / "small")).text
    assert "2,930,000 parameters and another shape than the paper's: no reproduction" in small
    for words in ("41M", "277M", "1.06", "0.99"):
        assert words in small, words
    same = make_run(tmp_path / "same", recipe="enwik8-12l", newlines='"keep"', max_tokens="1000")
    seen = page_of(same).text
    assert "shape of the paper's 12 layers model (41M parameters)" in seen
    assert "the first 1,000 tokens only" in seen and 'line ends as "keep"' in seen
    assert "Beside the paper" not in page_of(make_run(tmp_path / "other", recipe="wikitext2-small")).text


@pytest.mark.parametrize(
    ("recipe", "parameters"),
    [
        *(("wikitext103-standard", "151M"), ("wikitext103-large-16l", "257M"), ("wikitext103-128m", None)),
        *(("enwik8-12l", "41M"), ("enwik8-24l", "277M"), ("text8-24l", "277M")),
        *(("lm1b-base", "0.46B"), ("lm1b-large", "0.8B")),
    ],
)
def test_recipes_of_the_paper_match_its_rows(tmp_path, recipe, parameters):
    config = read_run(make_run(tmp_path / "mine", recipe=recipe), "mine").config
    row = paper.of_shape(config)
    assert (row and row.parameters) == parameters
    assert paper.differences(config, "") == []
    assert paper.of_shape(config | {"model": config["model"] | {"kind": "shaw"}}) is None


def test_several_runs_are_compared(tmp_path):
    runs = [make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run", lr="0.125"), make_run(tmp_path / "c")]
    seen = page_of(*runs)
    for words in ("3 runs side by side", "a/run", "b/run", "What differs", "train.lr", "0.125", "No difference."):
        assert words in seen.text, words
    assert "a/run valid from" in seen.titles()
    assert names([Path("x/run"), Path("x/run")]) == ["run #1", "run #2"]


def test_a_picture_is_shown_once_with_its_caption(tmp_path):
    run = make_run(tmp_path / "mine")
    folder = run / "attention"
    folder.mkdir()
    for suffix, size in ((".png", 50), (".svg", 70)):
        (folder / f"average{suffix}").write_bytes(b"x" * size)
    (folder / "attention.json").write_text('{"corpus": "some text", "split": "valid"}')
    seen = page_of(run)
    [image] = [attrs for tag, attrs in seen.elements if tag == "img"]
    assert image["src"].startswith("data:image/png;base64,")
    assert "as in the paper's Figure 5: some text, valid" in seen.text


def test_the_page_is_written_into_the_run_or_the_current_folder(tmp_path, monkeypatch, capsys):
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    monkeypatch.chdir(tmp_path)
    assert report([one]) == one / "report.html"
    assert report([one, two]) == Path("report.html") and (tmp_path / "report.html").exists()
    assert str(one / "report.html") in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match=r"nowhere is no run: it must be a folder"):
        report([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="at least one run"):
        report([])


def test_the_same_files_give_the_same_page(tmp_path):
    run = make_run(tmp_path / "mine")
    pages = {report([run]).read_bytes() for _ in range(2)}
    assert len(pages) == 1


floats = st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=100, deadline=None)
@given(st.lists(floats, min_size=1, max_size=200), st.integers(1, 9))
def test_thinning_keeps_the_ends_and_extremes_of_every_column(values, columns):
    y = np.array(values)
    x = np.arange(len(y), dtype=float)
    kept = thin(x, y, columns)
    finite = np.flatnonzero(np.isfinite(y))
    assert set(kept) <= set(finite) and (np.diff(kept) > 0).all()
    assert len(kept) <= max(4 * columns, 0)
    if len(finite):
        span = (x[finite[-1]] - x[finite[0]]) or 1
        column = np.minimum((x - x[finite[0]]) / span * columns, columns - 1).astype(int)
        for each in np.unique(column[finite]):
            inside, drawn = y[finite[column[finite] == each]], y[kept[column[kept] == each]]
            assert drawn.min() == inside.min() and drawn.max() == inside.max()
            assert drawn[0] == inside[0] and drawn[-1] == inside[-1]


@settings(max_examples=100, deadline=None)
@given(st.floats(1e-6, 1e6), st.floats(1.001, 1e6), st.booleans())
def test_ticks_are_few_and_inside(low, ratio, log):
    high = low * ratio
    found = ticks(low, high, log=log)
    assert 1 <= len(found) <= 8 and found == sorted(set(found))
    air = 1e-6 * high
    assert all(low - air <= mark <= high + air for mark in found)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(floats, floats), max_size=20), st.booleans(), st.booleans())
def test_any_figures_make_a_chart_inside_its_frame(points, log, zero):
    x, y = (np.array([point[i] for point in points], dtype=float) for i in (0, 1))
    drawn = chart([Series("a", x, y, "c0", "a", True)], name="any", log=log, zero=zero and not log)
    if drawn is None:
        return
    (width, height), paths = drawn.size, " ".join(path for path, _ in drawn.lines)
    points = [(float(a), float(b)) for a, b in re.findall(r"([-\d.einfa]+),([-\d.einfa]+)", paths)]
    points += [(a, b) for a, b, *_ in [*drawn.dots, *drawn.labels]]
    points += [(across, drawn.y.start) for _, across in drawn.x_ticks] + [
        (drawn.x.start, up) for _, up in drawn.y_ticks
    ]
    assert len(points) > len(drawn.dots)
    for across, up in points:
        assert -0.1 <= across <= width + 0.1 and -0.1 <= up <= height + 0.1


def test_a_lost_figure_breaks_the_line():
    y = np.array([1.0, 2, math.nan, 3, 4, math.nan, 5])
    drawn = chart([Series("a", np.arange(7.0), y, "c0")], name="broken")
    assert drawn is not None
    [path] = [path for path, _ in drawn.lines]
    assert path.count("M") == 3 and path.endswith("h0")
    assert drawn.lost.count("M") == 2


def test_a_long_run_makes_a_small_page_quickly(tmp_path):
    """A page of 20,000 lines takes 0.2 seconds; the limit allows for type checks and a busy machine."""
    entries = [line(step, 2 + math.sin(step)) for step in range(1, 20_001)] + [scored(20_000, 1.0)]
    entries[12_345]["loss"] = 7.0  # one spike, which must be visible
    run = make_run(tmp_path / "long", entries, max_steps="20000")
    begun = time.process_time()
    seen = page_of(run)
    assert time.process_time() - begun < 4
    assert f"most {7 / math.log(2):.4f}" in seen.titles()
    assert (run.parent / "page.html").stat().st_size < 200_000
