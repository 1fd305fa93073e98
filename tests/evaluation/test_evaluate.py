"""Scoring: sums and counts, memory between segments, and lines that are independent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from small_models import VARIANTS, small_model
from small_models import text as random_text
from table_model import TableModel

from transformer_xl.commands.eval import Eval
from transformer_xl.config.settings import CorpusConfig, EvalConfig, Lengths, RunConfig, TrainConfig
from transformer_xl.data.loader import Segment, StreamLoader
from transformer_xl.data.vocab import Vocab
from transformer_xl.evaluation.lines import score_lines
from transformer_xl.evaluation.score import EvalResult, evaluate
from transformer_xl.evaluation.sliding import Sliding
from transformer_xl.run.checkpoint import LoadedModel, save_checkpoint

LENGTHS = Lengths(tgt_len=5, mem_len=7)
TEXT = "the cat sat on a mat\nthe dog ate the cat\n"
BYTES = Vocab.build("byte", [])
CHARS = Vocab.build("char", [TEXT])
WORDS = Vocab.build("word", [TEXT])
DROPPED = Vocab.build("char", [TEXT], newlines="drop")


def tokens(length: int, vocab_size: int = 7) -> np.ndarray:
    return np.random.default_rng(length).integers(0, vocab_size, length).astype(np.uint8)


def nll_of(model: TableModel, text: np.ndarray) -> np.ndarray:
    """Nats of text[1:] for a stream that starts with it."""
    moments = np.arange(len(text) - 1) % len(model.table)
    return -model.table.detach().numpy()[moments, text[:-1], text[1:]]


class Given(TableModel):
    """A model whose loss of each target is given."""

    def forward(self, ids, targets, memory, lengths):
        return targets.clamp(min=0).float(), memory


def segments_of(targets: list[list[int]]) -> list[Segment]:
    return [Segment(torch.zeros(1, len(row), dtype=torch.int64), torch.tensor([row]), None) for row in targets]


def test_figures_by_hand():
    result = EvalResult(nats=4 * math.log(8), targets=4, seconds=2.0, lengths=LENGTHS, bytes=6, unit="word")
    assert math.isclose(result.loss, math.log(8))
    assert math.isclose(result.ppl, 8)
    assert math.isclose(result.bpc, 3)
    assert result.bits_per_byte is not None and math.isclose(result.bits_per_byte, 2)
    assert result.tokens_per_second == 2
    assert result.headline == ("ppl", result.ppl)
    names = [EvalResult(1.0, 1, 1.0, LENGTHS, unit=unit).headline[0] for unit in ("byte", "char", "word")]
    assert names == ["bpc", "bpc", "ppl"] and EvalResult(1e4, 1, 1.0, LENGTHS).ppl == math.inf
    assert "ppl 8.0000" in str(result) and "4 targets" in str(result) and "bits per byte 2.0000" in str(result)
    told = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert told == told | {"targets": 4, "bytes": 6, "tgt_len": 5, "mem_len": 7, "attn_len": None, "finite": True}
    assert math.isclose(told["ppl"], 8) and math.isclose(told["bits_per_byte"], 2)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_sum_of_nats_equals_the_table(batch_size):
    model, text = TableModel(), tokens(47)
    loader = StreamLoader(text, batch_size=batch_size, tgt_len=5)
    result = evaluate(model, loader, LENGTHS)
    edges = [0, *np.cumsum([len(part) for part in np.array_split(text[1:], batch_size)])]
    expected = sum(nll_of(model, text[a : b + 1]).sum() for a, b in pairwise(edges))
    assert result.targets == 46 and result.lengths is LENGTHS
    assert math.isclose(result.nats, expected, rel_tol=1e-6)


def test_sums_are_float64():
    result = evaluate(Given(), segments_of([[2**25], *[[1]] * 9]), LENGTHS)
    assert result.nats == 2**25 + 9 and result.targets == 10


@pytest.mark.parametrize("batch_size", [1, 3])
def test_documents_are_scored_each_from_an_empty_memory(batch_size):
    model, text, documents = TableModel(), tokens(47), [0, 4, 5, 19, 28, 30, 41]
    result = evaluate(model, StreamLoader(text, batch_size=batch_size, tgt_len=5, documents=documents), LENGTHS)
    parts = [nll_of(model, part).sum() for part in np.split(text, documents[1:])]
    assert result.targets == 40 and math.isclose(result.nats, sum(parts), rel_tol=1e-6)


def test_bits_per_byte_count_the_bytes_of_targets():
    model, text = TableModel(len(WORDS)), WORDS.encode(TEXT)
    loader = StreamLoader(text, batch_size=2, tgt_len=3)
    result = evaluate(model, loader, LENGTHS, unit="word", token_sizes=WORDS.token_sizes())
    assert result.bytes == WORDS.token_sizes()[text[1:]].sum()
    assert result.bits_per_byte == result.nats / math.log(2) / WORDS.token_sizes()[text[1:]].sum()
    assert evaluate(model, loader, LENGTHS).bits_per_byte is None


def test_dropout_is_off_and_every_module_keeps_its_mode_even_after_an_error():
    model, loader = (
        small_model(vocab_size=7, dropout=0.5, train=True),
        StreamLoader(tokens(20), batch_size=2, tgt_len=5),
    )
    model.backbone.layers[1].eval()
    modes = [module.training for module in model.modules()]
    assert evaluate(model, loader, LENGTHS).nats == evaluate(small_model(vocab_size=7), loader, LENGTHS).nats
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(ValueError, match="targets must be at most"):
        evaluate(model, segments_of([[0], [99]]), LENGTHS)
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_sum_that_is_not_finite_is_reported(bad):
    model = TableModel()
    with torch.no_grad():
        model.table[:, 2, 3] = -bad
    result = evaluate(model, StreamLoader(np.array([1, 2, 3, 4]), batch_size=1, tgt_len=5), LENGTHS)
    assert not math.isfinite(result.nats) and result.targets == 3 and "NOT FINITE" in str(result)
    told = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert told["finite"] is False and told["nats"] is None and told["ppl"] is None


@pytest.mark.parametrize(("half", "rough"), [("bf16", 0.02), ("fp16", 0.0025)])
def test_half_precision_is_used_if_requested(half, rough):
    model = small_model(vocab_size=7, dtype=torch.float32)
    loader = StreamLoader(tokens(200), batch_size=4, tgt_len=5)
    exact, found = (evaluate(model, loader, LENGTHS, precision=precision) for precision in ("fp32", half))
    assert exact.nats != found.nats
    assert math.isclose(exact.loss, found.loss, rel_tol=rough)


def test_a_text_without_a_target_is_refused():
    with pytest.raises(ValueError, match="at least 2 tokens"):
        evaluate(TableModel(), segments_of([[-1, -1]]), LENGTHS)


def scores_of(
    model: Any, vocab: Vocab, lines: Iterable[str | bytes], lengths: Lengths, run: RunConfig | None = None, **how: Any
) -> list[EvalResult]:
    return score_lines(LoadedModel(model, vocab, run or RunConfig()), lines, lengths, **how)


@pytest.mark.parametrize(
    ("vocab", "line", "context", "targets", "size"),
    [
        (WORDS, "the cat sat", "\n", "the cat sat\n", 4 + 4 + 4 + 1),
        (CHARS, "the cat", "\n", "the cat\n", 8),
        (BYTES, "thé cat", "\n", "thé cat\n", 9),
        (BYTES, "", "\n", "\n", 1),
        (DROPPED, "the cat", "t", "he cat", 6),
    ],
)
def test_line_ends_surround_a_line_if_the_vocabulary_has_them(vocab, line, context, targets, size):
    model = TableModel(len(vocab))
    (score,) = scores_of(model, vocab, [line], Lengths(tgt_len=3, mem_len=4))
    text = np.concatenate([vocab.encode(context), vocab.encode(targets)]).astype(np.int64)
    assert score.targets == len(text) - 1 and score.bytes == size
    assert math.isclose(score.nats, nll_of(model, text).sum(), rel_tol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"kind": "vaswani"}], ids=["distances", "positions from the start"])
def test_lines_read_the_context_again_as_an_evaluation_does(changes):
    model, lines, call = small_model(**changes), ["ab" * 9, "cabbage", "a"], Lengths(tgt_len=4, mem_len=0)
    chars = Vocab.build("char", ["abcdefghijklmnopqrstuv\n"])
    for line, score in zip(
        lines, scores_of(model, chars, lines, call, RunConfig(eval=EvalConfig(context_len=6))), strict=True
    ):
        ids = chars.encode(f"\n{line}\n")
        loader = StreamLoader(ids, batch_size=1, tgt_len=4, context_len=6)
        assert score.nats == pytest.approx(evaluate(model, loader, call).nats)


def test_lines_may_include_their_line_ends():
    model = TableModel(256)
    plain = scores_of(model, BYTES, ["one", "two"], LENGTHS)
    assert scores_of(model, BYTES, iter(["one\n", "two\n"]), LENGTHS) == plain
    assert scores_of(model, BYTES, [b"one\n", b"two"], LENGTHS) == plain
    assert scores_of(model, BYTES, [], LENGTHS) == []


def test_a_line_without_targets_has_no_perplexity():
    (empty, one) = scores_of(TableModel(len(DROPPED)), DROPPED, ["", "t"], LENGTHS)
    assert empty == one and (empty.nats, empty.targets, empty.bytes) == (0.0, 0, 0)
    assert math.isnan(empty.ppl) and empty.to_json()["ppl"] is None


def test_an_unknown_character_is_reported_with_its_line():
    closed = Vocab.build("word", [TEXT], closed=True)
    with pytest.raises(ValueError, match=r"^Line 2: .*'zebra'"):
        scores_of(TableModel(len(closed)), closed, ["the cat", "the zebra"], LENGTHS)


def test_lines_of_similar_length_share_batches_within_the_budget():
    model = TableModel(256)
    lines = ["x" * length for length in (1, 9, 2, 8, 3)]
    scores_of(model, BYTES, lines, Lengths(tgt_len=4, mem_len=4), batch_tokens=8)
    assert model.calls == [(2, 4), (2, 4), (2, 2), (2, 4), (1, 2)]


@given(
    counts=st.lists(st.integers(0, 9) | st.integers(0, 200), min_size=1, max_size=30),
    tgt_len=st.integers(1, 17),
    batch_tokens=st.integers(1, 300),
)
@example(counts=[400, *[10] * 29], tgt_len=10, batch_tokens=300)
def test_at_least_half_of_the_positions_read_are_targets(counts, tgt_len, batch_tokens):
    model = TableModel(256)
    lines = ["x" * count for count in counts]
    scores = scores_of(model, BYTES, lines, Lengths(tgt_len=tgt_len, mem_len=4), batch_tokens=batch_tokens)
    assert sum(rows * width for rows, width in model.calls) <= 2 * sum(score.targets for score in scores)
    assert all(rows * width <= max(batch_tokens, width) for rows, width in model.calls)
    expected = [nll_of(model, np.array([10, *[120] * count, 10])).sum() for count in counts]
    assert [score.nats for score in scores] == pytest.approx(expected, rel=1e-5)


STATES: dict[str, Any] = {
    "cache": lambda: small_model(),
    "cache of zeros": lambda: small_model(zero_memory=True),
    "windows": lambda: Sliding(small_model(), 4, 2),
    "recurrent": lambda: small_model(kind="lstm"),
}


@pytest.mark.parametrize("state", STATES)
def test_a_line_that_ends_does_not_change_other_lines_in_any_state(state):
    chars = Vocab.build("char", ["".join(map(chr, range(97, 97 + 22))) + "\n"])
    model, lines = STATES[state](), ["abcdefghijklmnopqrstuv", "a", "bcdefgh", "cdefghijklmn", "ddd", "efgabcf"]
    together = scores_of(model, chars, lines, LENGTHS)
    alone = [score for line in lines for score in scores_of(model, chars, [line], LENGTHS)]
    for one, other in zip(together, alone, strict=True):
        assert replace(one, nats=other.nats) == other and math.isclose(one.nats, other.nats, rel_tol=1e-9)  # float64


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.08, 1e9])
def test_a_temperature_applies_to_the_whole_distribution(variant, temperature, monkeypatch):
    model, ids, targets = small_model(**VARIANTS[variant]), random_text(2, 9), random_text(2, 9, seed=1)
    targets[1, 4] = -1
    with torch.no_grad():
        scores, _ = model.log_probs(ids, None, LENGTHS)
        expected = -(scores / temperature).log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        model.softmax.temperature = temperature
        nll, _ = model(ids, targets, None, LENGTHS)
        torch.testing.assert_close(nll, expected.masked_fill(targets < 0, 0))
        monkeypatch.setattr("transformer_xl.model.adaptive.MOST_SCORES", 4 * 23)  # four positions at a time
        torch.testing.assert_close(model(ids, targets, None, LENGTHS)[0], nll)


def saved(folder: Path, **shape: Any) -> Path:
    """A run in a folder with its text."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    model = small_model(vocab_size=256, dtype=torch.float32, **shape)
    config = RunConfig(
        model=model.config,
        corpus=CorpusConfig(name=str(folder / "text.txt")),
        train=TrainConfig(tgt_len=8, mem_len=8, attn_len=None if shape else 5),
        eval=EvalConfig(batch_size=2, max_tokens=60),
    )
    return save_checkpoint(folder / "run", model=model, vocab=BYTES, config=config)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("eval"))


class TestRun:
    """`txl eval`: options work together."""

    def told(self, run: Path, capsys: pytest.CaptureFixture[str], **asked: Any) -> dict[str, Any]:
        capsys.readouterr()
        Eval(run, device="cpu", precision="fp32", json=True, **asked).run()
        return json.loads(capsys.readouterr().out)

    def test_requested_options_reach_evaluation(self, run, capsys):
        plain = self.told(run, capsys)
        assert plain == plain | {"sliding": None, "temperature": 1.0, "dynamic": None}
        assert self.told(run, capsys, temperature=1.5)["results"][0]["nats"] != plain["results"][0]["nats"]
        asked = self.told(run, capsys, sliding=2, temperature=1.08, dynamic="sgd", dynamic_lr=0.1)
        assert asked["sliding"] == 2 and asked["temperature"] == 1.08 and asked["dynamic"]["lr"] == 0.1
        assert asked["results"][0] == asked["results"][0] | {
            "targets": 60,
            "tgt_len": 8,
            "mem_len": 0,
            "attn_len": None,
        }

    @pytest.mark.parametrize("shape", [{}, {"kind": "lstm"}], ids=str)
    def test_sliding_reads_one_stream(self, shape, capsys, tmp_path):
        run = saved(tmp_path, **shape)
        found = self.told(run, capsys, sliding=3, tgt_len=6)["results"][0]["nats"]
        lines = (run.parent / "text.txt").read_text().splitlines(keepends=True)  # the last two are the test split
        alone = evaluate(
            Sliding(small_model(vocab_size=256, dtype=torch.float32, **shape), 6, 3),
            StreamLoader(BYTES.encode("".join(lines[-2:])), batch_size=1, tgt_len=7, max_tokens=60),
            LENGTHS,
        )
        assert math.isclose(found, alone.nats, rel_tol=1e-6)

    def test_a_text_is_read_whole_unless_it_has_splits_or_one_is_named(self, run, capsys, own_folder):
        """Every target of the named file, not only the last 5 %."""
        for name, count in {"train.txt": 9, "dev.txt": 5, "test.txt": 3}.items():
            Path(name).write_text("a fox\n" * count)
        for name in ("other.txt", "ptb"):
            Path(name).write_text("a fox and a dog\n" * 30)
        own = str(run.parent / "text.txt")
        for data, asked, targets, said in (
            ("other.txt", None, 30 * 16 - 1, "all: other.txt."),
            ("other.txt", "all", 30 * 16 - 1, ""),
            ("other.txt", "test", 24 - 1, ""),
            (".", None, 3 * 6 - 1, ""),
            (".", "all", 17 * 6 - 1, ""),
            (own, None, 40 * 44 - 1, "trained this model, and is read whole: --split test"),
            ("ptb", None, 30 * 16 - 1, "ptb is read here, not the corpus of that name"),
        ):
            Eval(run, device="cpu", data=data, split=asked, max_tokens=0, json=True).run()
            shown = capsys.readouterr()
            assert json.loads(shown.out)["results"][0]["targets"] == targets and said in shown.err, data

    @pytest.mark.parametrize(("rule", "lr"), [("sgd", 0.02), ("rms", 0.1)])
    def test_dynamic_evaluation_learns_and_at_a_rate_of_zero_does_not(self, run, capsys, rule, lr):
        how = {"dynamic": rule, "dynamic_lr": lr} | ({"dynamic_tokens": 40} if rule == "rms" else {})
        plain = self.told(run, capsys, batch_size=1)["results"][0]["loss"]
        still = self.told(run, capsys, **how | {"dynamic_lr": 0.0})["results"][0]["loss"]
        learned = [result["loss"] for result in self.told(run, capsys, mem_len=(8, 3), **how)["results"]]
        assert math.isclose(still, plain, rel_tol=1e-6) and learned[0] < plain - 0.05 and learned[1] != learned[0]

    def test_gradients_for_another_text_are_measured_on_the_runs_own(self, run, capsys, tmp_path):
        (tmp_path / "other.txt").write_text("a fox and a dog\n" * 30)
        how = {"dynamic": "rms", "dynamic_tokens": 40, "dynamic_lr": 0.1, "max_tokens": 100}
        assert self.told(run, capsys, data=str(tmp_path / "other.txt"), **how)["results"][0]["targets"] == 100

    def test_bytes_leave_out_the_end_of_a_document(self, run):
        model, end = small_model(vocab_size=256, dtype=torch.float32), ord("n")
        runs = (RunConfig(model=replace(model.config, document_end=each)) for each in (None, end))
        [plain], [counted] = (scores_of(model, BYTES, ["one"], LENGTHS, run) for run in runs)
        assert (plain.bytes, counted.bytes, plain.nats) == (4, 3, counted.nats)
