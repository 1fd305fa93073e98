"""The page of a run is right even if files are missing, keeps every extreme, and escapes every text of a file."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.commands.report import Report
from transformer_xl.config.recipe import load_recipe, write_toml
from transformer_xl.report.curves import HEIGHT, WIDTH, Axis, Series, chart, thin, ticks
from transformer_xl.report.record import read_run
from transformer_xl.run import short_names

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


def make_run(folder: Path, entries=None, recipe: str = "enwik8-small", **changes: str) -> Path:
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
    return folder


def report(runs: Sequence[Path], out: Path | None = None, **options: Any) -> None:
    Report(tuple(runs), out, **options).run()


def page_of(*runs: Path, **options: Any) -> Page:
    out = runs[0].parent / "page.html"
    report(runs, out, **options)
    return Page(out.read_text("utf-8"))


def test_a_page_shows_the_main_figures(tmp_path):
    seen = page_of(make_run(tmp_path / "mine"), title="My run").text
    for words in ("My run", f"{1.25 / math.log(2):.4f} bpc", "1,320", "some text", "20 of 20", "0:03"):
        assert words in seen, words


@pytest.mark.parametrize(("device", "machine"), [("cpu", "an EPYC"), ("cuda", "an H200"), ("cuda:1", "an H200")])
def test_a_page_names_the_device_of_the_training(tmp_path, device, machine):
    run = make_run(tmp_path / "mine", device=f'"{device}"')
    (run / "environment.json").write_text(json.dumps({"devices": ["an EPYC", "an H200"]}))
    assert f"6 layers of 192, 3 heads, on some text (bytes); trained on {machine}" in page_of(run).text


def test_tokens_are_counted_from_speeds_and_times(tmp_path):
    entries = [line(10, 2.0), line(20, 1.5, tokens_per_second=231.0, skipped=5)]
    record = read_run(make_run(tmp_path / "a", entries), "a")
    assert record.tokens(np.array([0.0, 10, 15, 20])).tolist() == [0, 660, 825, 990]


def test_parameters_are_counted_in_the_checkpoint(tmp_path):
    from safetensors.numpy import save_file

    run = make_run(tmp_path / "mine")
    folder = run / "checkpoints" / "step_00000010"
    folder.mkdir(parents=True)
    save_file({"a": np.zeros((3, 5)), "b": np.zeros(7), "c": np.zeros(())}, folder / "model.safetensors")
    assert read_run(run, "mine").parameters == 23


def test_every_text_of_a_file_is_escaped(tmp_path):
    """The elements of a page do not depend on its texts."""
    pages = {}
    for words in ("plain", EVIL):
        stored = words.replace("\x00", "").replace("\ud800", "")
        entries = [line(10, 1.0), scored(10, 1.0, corpus=words, split=words, unit=words, mem_len=words)]
        entries.append({"step": 10, "sample": f"{words}\n{words}"})
        run = make_run(tmp_path / re.sub(r"\W", "", words) / stored.replace("/", ""), entries)
        config = (run / "config.toml").read_text()
        (run / "config.toml").write_text(config.replace('name = "enwik8"', f"name = {json.dumps(stored)}"), "utf-8")
        (run / "environment.json").write_text(json.dumps({words: words, "init": words, "cores": words}))
        (run / "analysis").mkdir()
        (run / "analysis" / "map.png").write_text("<svg><script>alert(1)</script></svg>")
        pages[words] = page_of(run, title=words)
    plain, evil = (pages[words].elements for words in ("plain", EVIL))
    assert [(tag, sorted(attrs)) for tag, attrs in evil] == [(tag, sorted(attrs)) for tag, attrs in plain]
    assert not {"script", "iframe", "object", "link"} & {tag for tag, _ in evil}
    assert not any(name.startswith("on") for _, attrs in evil for name in attrs)
    assert pages[EVIL].text.count("<script>alert(1)</script>") >= 8  # shown as text
    assert [attrs["src"][:22] for tag, attrs in evil if tag == "img"] == ["data:image/png;base64,"]
    policy = next(attrs["content"] for tag, attrs in evil if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


@pytest.mark.parametrize("missing", ["config.toml", "environment.json", "metrics.jsonl"])
@pytest.mark.parametrize("damage", [None, b"\xff\x00{", b"[1, 2]\n[3]\n", b"null\nnull\n", b""])
def test_the_page_names_missing_and_damaged_files(tmp_path, missing, damage):
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


def test_figures_that_are_not_finite_are_reported(tmp_path):
    entries = [line(5, 2.0), line(10, None, skipped=5, grad_norm=None), line(20, 1.5), scored(20, None, "test")]
    seen = page_of(make_run(tmp_path / "mine", entries))
    for words in ("1 of 3 lines", "5 steps were skipped", "test loss is not finite", "not finite"):
        assert words in seen.text, words


def test_samples_keep_their_lines_and_steps(tmp_path):
    """Samples are entries of the metrics. They are not evaluations and not in the curves."""
    texts = [(step, f"one <{step}>\n\ntwo\n") for step in range(5, 20)]
    entries = [line(10, 2.0), *({"step": step, "sample": text} for step, text in texts)]
    run = make_run(tmp_path / "mine", entries)
    record = read_run(run, "mine")
    assert [(sample["step"], sample["sample"]) for sample in record.samples] == texts
    assert not record.evaluations and record.train["step"].tolist() == [10]
    seen = page_of(run).text
    for words in ("After step 19", "one <19>\n\ntwo\n", "14 earlier samples", "After step 5"):
        assert words in seen, words


def test_the_test_figure_is_measured_at_the_settings_lengths(tmp_path):
    asked = scored(20, 1.25, "test")
    others = [scored(20, 1.125, "test", mem_len=12), scored(20, 1.5, "test", mem_len=0)]
    for entries in ([asked, *others], [*others, asked]):
        record = read_run(make_run(tmp_path / str(entries is None) / entries[0]["loss"].hex(), entries), "mine")
        assert record.test_entry == asked


def test_the_papers_figures_are_shown_with_the_runs(tmp_path):
    small = page_of(make_run(tmp_path / "small")).text
    for words in ("Comparison with the paper", "41M", "277M", "1.06", "0.99"):
        assert words in small, words
    assert "Comparison with the paper" not in page_of(make_run(tmp_path / "other", recipe="wikitext2-small")).text


def test_several_runs_are_compared(tmp_path):
    runs = [make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run", lr="0.125"), make_run(tmp_path / "c")]
    seen = page_of(*runs)
    for words in ("3 runs side by side", "a/run", "b/run", "train.lr", "0.125"):
        assert words in seen.text, words
    assert "a/run valid from" in seen.titles()
    assert short_names([Path("x/run"), Path("x/run")]) == ["run #1", "run #2"]


def test_a_picture_is_shown_once_with_its_caption(tmp_path):
    run = make_run(tmp_path / "mine")
    folder = run / "attention"
    folder.mkdir()
    for suffix in (".png", ".svg"):
        (folder / f"average{suffix}").write_bytes(b"picture")
    seen = page_of(run)
    [image] = [attrs for tag, attrs in seen.elements if tag == "img"]
    assert image["src"].startswith("data:image/png;base64,")
    assert "as in the paper's Figure 5" in seen.text


@pytest.mark.timeout(20)
def test_what_a_link_names_is_not_put_into_a_page(tmp_path):
    run = make_run(tmp_path / "mine")
    (tmp_path / "private.png").write_bytes(b"a private file")
    (run / "analysis").mkdir()
    (run / "analysis" / "x.png").symlink_to(tmp_path / "private.png")
    (run / "recl").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo(run / "analysis" / "y.png")
    seen = page_of(run)
    assert not [tag for tag, _ in seen.elements if tag == "img"]
    for name in ("analysis/x.png", "analysis/y.png"):
        assert f"{name} is a link or no file, and is left out." in seen.text


def test_the_page_is_written_into_the_run_or_the_current_folder(tmp_path, monkeypatch, capsys):
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    monkeypatch.chdir(tmp_path)
    report([one])
    report([one, two])
    assert (one / "report.html").exists() and (tmp_path / "report.html").exists()
    assert str(one / "report.html") in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match=r"nowhere is not a run: it must be a folder"):
        report([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="at least one run"):
        report([])


def test_the_same_files_give_the_same_page(tmp_path):
    run = make_run(tmp_path / "mine")
    pages = set()
    for _ in range(2):
        report([run])
        pages.add((run / "report.html").read_bytes())
    assert len(pages) == 1


floats = st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=examples(100), deadline=None)
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


@settings(max_examples=examples(100), deadline=None)
@given(st.floats(1e-6, 1e6), st.floats(1.001, 1e6), st.booleans())
def test_ticks_are_few_and_inside(low, ratio, log):
    high = low * ratio
    found = ticks(low, high, log=log)
    assert 1 <= len(found) <= 12 and found == sorted(set(found))
    air = 1e-6 * high
    assert all(low - air <= mark <= high + air for mark in found)


@pytest.mark.parametrize(("low", "high"), [(3.7331, 3.7339), (0.0, 1.0), (999_990.0, 1_000_010.0), (1e-4, 1.01e-4)])
def test_ticks_of_an_axis_have_different_labels(low, high):
    labels = [label for label, _ in Axis(low, high, 0.0, 100.0).ticks(6)]
    assert len(set(labels)) == len(labels) >= 2


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(floats, floats), max_size=20), st.booleans(), st.booleans())
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


def test_a_long_run_makes_a_small_page_quickly(tmp_path):
    """A page of 20,000 lines takes 0.2 seconds; the limit allows for type checks and a busy machine."""
    entries = [line(step, 2 + math.sin(step)) for step in range(1, 20_001)] + [scored(20_000, 1.0)]
    entries[12_345]["loss"] = 7.0  # one spike, which must be visible
    run = make_run(tmp_path / "long", entries, max_steps="20000")
    begun = time.process_time()
    seen = page_of(run)
    assert time.process_time() - begun < 4
    paths = [attrs["d"] or "" for tag, attrs in seen.elements if attrs.get("class") == "line c0 thin"]
    highest = min(float(up) for up in re.findall(r",([\d.]+)", paths[0]))
    assert highest < HEIGHT / 4
    assert (run.parent / "page.html").stat().st_size < 200_000
