"""Timings of the model: bounds count every product, wrong results are not timed, and processes fail in one sentence."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import text
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import bound, flex, gate, race
from benchmarks.__main__ import main
from benchmarks.options import Options
from benchmarks.ours import op_inputs
from benchmarks.textbook import Model, attend
from transformer_xl import ops
from transformer_xl.config.recipe import load_recipe
from transformer_xl.config.settings import Lengths, TransformerXLConfig
from transformer_xl.model.transformer_xl import TransformerXL

SIZES = TransformerXLConfig(vocab_size=23, n_layer=3, n_head=2, d_head=5, d_model=14, d_inner=11, init_std=0.3)
BANDS = replace(SIZES, cutoffs=(5, 13), tie_projs=(False, True, True))
B, T, M = 3, 7, 11


def textbook_of(model: TransformerXL) -> Model:
    textbook = Model(asdict(model.config))
    textbook.load_state_dict({name.removeprefix("backbone."): value for name, value in model.state_dict().items()})
    return textbook


def empty_state(model: Model, length: int = 0, batch: int = B) -> list[torch.Tensor]:
    return [torch.zeros(batch, length, model.sizes["d_model"]) for _ in model.layers]


@pytest.mark.parametrize("config", [SIZES, BANDS], ids=["plain", "bands"])
def test_the_textbook_has_the_losses_of_ours(config: TransformerXLConfig) -> None:
    torch.manual_seed(0)
    ours = TransformerXL(replace(config, untie_r=True)).eval()
    textbook = textbook_of(ours).eval()
    ids, state, memory = text(B, 4 * T + 1), empty_state(textbook), None
    for start in range(0, 4 * T, T):
        x, y = ids[:, start : start + T], ids[:, start + 1 : start + T + 1]
        nll, memory = ours(x, y, memory, Lengths(tgt_len=T, mem_len=M))
        hidden, state = textbook(x, state, M)
        found = textbook.softmax.nll(hidden.flatten(0, 1), y.flatten()).view_as(nll)
        torch.testing.assert_close(found, nll, rtol=1e-5, atol=1e-5)  # float32, and a few sums on the way
        follows = textbook.softmax.log_probs(hidden.flatten(0, 1)).gather(1, y.reshape(-1, 1)).view_as(nll)
        torch.testing.assert_close(-follows, nll, rtol=1e-5, atol=1e-5)


def counted(config: TransformerXLConfig, *, training: bool) -> float:
    """FLOP of the textbook model as PyTorch counts them."""
    model = Model(asdict(config)).train(training)
    ids = text(B, T + 1)
    with FlopCounterMode(display=False) as counter:
        hidden, _ = model(ids[:, :-1], empty_state(model, M), M)
        nll = model.softmax.nll(hidden.flatten(0, 1), ids[:, 1:].flatten())
        if training:
            nll.mean().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("config", [SIZES, BANDS], ids=["plain", "bands"])
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_the_formula_counts_the_products_of_the_textbook(config: TransformerXLConfig, training: bool) -> None:
    targets = text(B, T + 1)[:, 1:]
    tails = [int(((targets >= low) & (targets < high)).sum()) for low, high in ((5, 13), (13, 23))]
    unmasked = bound.Work(B, T, M, tails if config.cutoffs else (), attn_len=M + T)
    total = sum(product.flop for product in bound.products(config, unmasked, training=training))
    inside, layers = config.n_head * config.d_head, config.n_layer
    memory = 2 * B * M * config.d_model * inside * layers  # one projection of the memory
    if training:  # the textbook projects the memory's queries, forward and backward, and gives the memory a gradient
        total += memory * (2 + 3)
    else:  # it projects the memory and the positions again
        total += memory * 3 + 2 * (M + T) * config.d_model * inside * layers
    assert counted(config, training=training) == pytest.approx(total, rel=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gets_the_whole_position_term() -> None:
    sizes = {"batch": 2, "heads": 3, "head_size": 16, "tgt_len": 7, "mem_len": 11}  # it wants heads of 16 at least
    inputs = op_inputs(sizes | {"precision": "fp32", "device": "cpu", "backward": False})
    mask = create_block_mask(lambda b, h, i, j: j <= i + 11, None, None, 7, 18, device="cpu")
    torch.testing.assert_close(flex._attend(**inputs, mask=mask), attend(**inputs))


def test_masked_scores_are_left_out() -> None:
    seen = bound.seen_share(bound.Work(B, T, M)) * T * (M + T)
    assert seen == pytest.approx(sum(M + i + 1 for i in range(T)))
    assert bound.seen_share(bound.Work(B, T, M, attn_len=5)) * T * (M + T) == pytest.approx(5 * T)


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("gate", ["input", "output", "highway", "sigmoid-tanh", "gru"])
def test_the_formula_counts_the_products_of_gates(gate: str, training: bool) -> None:
    flop = []
    for name in ("none", gate):
        model, ids = TransformerXL(replace(SIZES, gate=name)).train(training), text(B, T)
        with FlopCounterMode(display=False) as counter:
            nll, _ = model(ids, ids, None, Lengths(tgt_len=T, mem_len=M))
            if training:
                nll.sum().backward()
        flop.append(counter.get_total_flops())
    found = bound.products(replace(SIZES, gate=gate), bound.Work(B, T, 0), training=training)
    assert sum(p.flop for p in found if p.name.startswith("gates")) == flop[1] - flop[0]


@pytest.mark.parametrize("gate", ["none", "gru"])
@pytest.mark.parametrize("name", ["enwik8-12l", "wikitext103-standard", "wikitext103-large", "lm1b-base"])
def test_weights_count_the_matrices_of_the_model(name: str, gate: str) -> None:
    config = replace(load_recipe(name).model, gate=gate)
    with torch.device("meta"):
        model = TransformerXL(config)
    matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2 and "cluster" not in name}
    tied = sum(p.numel() for name, p in matrices.items() if "softmax.projections" in name)
    every = sum(p.numel() for p in matrices.values())
    assert bound.weights(config) == pytest.approx(every - tied, rel=2e-3)


class Recorded:
    """Takes the given seconds, and records its turns."""

    def __init__(self, name: str, seconds: float, turns: list[tuple[str, int]]) -> None:
        self.name, self.seconds, self.turns = name, seconds, turns

    def run(self, times: int) -> float:
        self.turns.append((self.name, times))
        return self.seconds


def test_contenders_take_turns() -> None:
    turns: list[tuple[str, int]] = []
    runners = {"slow": Recorded("slow", 1.0, turns), "fast": Recorded("fast", 0.1, turns)}
    timings = race.race(runners, 3, turn_seconds=0.35)
    assert turns[4:] == [("slow", 1), ("fast", 4)] * 3
    assert timings == {"slow": race.Timing(1.0, 1.0, 1.0), "fast": race.Timing(0.1, 0.1, 0.1)}


class Reads:
    """A contender that reports these losses."""

    def __init__(self, *nll: float) -> None:
        self.nll = list(nll)

    def call(self, name: str, pieces: list[int]) -> list[float]:
        return self.nll


def test_different_losses_end_the_benchmark() -> None:
    near: Any = {"textbook fp32": Reads(2.0, 4.0), "ours fp32": Reads(2.0001, 4.0), "ours bf16": Reads(2.015, 4.015)}
    found = gate.check_same(near, "textbook fp32", [2])
    assert found["ours bf16"] == pytest.approx(0.005) and found["textbook fp32"] == 0
    for far in (4.0, 2.0), (2.0, math.nan):  # the same mean does not help
        with pytest.raises(AssertionError, match="No speed is reported: losses of ours bf16"):
            gate.check_same(near | {"ours bf16": Reads(*far)}, "textbook fp32", [2])


def test_losses_show_a_wrong_attention() -> None:
    model = TransformerXL(Options("train", size="toy").config().model).eval()
    ids, mean_square = text(B, 65), torch.zeros(())
    for change in ("backbone.position_bias", "backbone.layers.0.attention.position.weight"):
        read = []
        for changed in (False, True):
            with torch.no_grad():
                if changed:
                    model.get_parameter(change).zero_()
                read.append(model(ids[:, :-1], ids[:, 1:], None, Lengths(tgt_len=64, mem_len=0))[0])
        mean_square = (read[1] - read[0]).square().mean().sqrt() / read[0].mean()
        assert mean_square > 10 * gate.TOLERANCES["fp32"]
    assert mean_square > gate.TOLERANCES["bf16"], "without a position term"


def test_a_broken_backend_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, whole in list(ops.BACKENDS.items()):
        if name != "reference":
            broken = lambda call, whole=whole: whole(call) * 1.01  # noqa: E731
            monkeypatch.setitem(ops.BACKENDS, name, broken)
    for part in ("train", "op"):
        with pytest.raises(AssertionError, match="No speed is reported: attention by"):
            main([part, "--size", "toy", "--precision", "fp32"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("read request; echo so be it >&2; exit 3", "ended with status 3; its last line: so be it"),
        (f'exec {sys.executable} -S "$@"', "must be the Python of an environment with torch and transformers"),
    ],
)
def test_a_python_that_cannot_run_a_peer_is_refused_in_one_sentence(tmp_path, capsys, line, told) -> None:
    peer = tmp_path / "python"
    peer.write_text(f"#!/bin/sh\n{line}\n")
    peer.chmod(0o755)
    assert main(["train", "--size", "toy", "--precision", "fp32", "--peers", str(peer)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and told in err and str(peer) in err
    assert len(err.splitlines()) == 1 and err.startswith("benchmarks: ")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "--peers", "nowhere/python"], "--peers must be a Python interpreter"),
        (["train", "--batch-size", "65"], "--batch-size must be at least 1 and at most 64"),
        (["train", "--against", "nowhere"], "--against must be a checkout of this repository"),
        (["train", "--tgt-len", "0"], "--tgt-len must be at least 1"),
        (["train", "--recipe", "text-small"], "must be a recipe that sets vocab_size"),
        (["decode", "--tgt-len", "3"], "--tgt-len has no effect on decode"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    part, *others = words
    assert main([part, "--size", "toy", "--precision", "fp32", *others]) == 2
    assert told in capsys.readouterr().err


def test_the_textbook_model_has_no_projected_embeddings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.toml").write_text("[model]\nvocab_size = 23\nd_model = 16\nd_embed = 8\nn_layer = 1\n")
    assert main(["train", "--recipe", str(tmp_path / "small.toml"), "--precision", "fp32"]) == 2
    assert "the textbook model has no projected embeddings" in capsys.readouterr().err


@pytest.mark.outside
def test_another_checkout_takes_part_with_its_own_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(race.ROOT / "benchmarks", tmp_path / "benchmarks")
    (tmp_path / "transformer_xl").symlink_to(race.ROOT / "transformer_xl")
    options = ["eval", "--size", "toy", "--precision", "fp32", "--repeats", "1", "--against", str(tmp_path)]
    assert main(options) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["cases"][0]["rows"]
    assert [row["contender"] for row in rows] == ["textbook", "ours, against", "ours", "bound"]
    with (tmp_path / "benchmarks" / "ours.py").open("a") as file:
        file.write("\nOurs.score = property()\n")
    assert main(options) == 2
    assert "The process of ours, against fp32" in capsys.readouterr().err


def toy(part: str, capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    """The cases of a part's result."""
    assert main([part, "--size", "toy", "--precision", "fp32", *options]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["part"] == part and result["hardware"]["threads"] >= 1 and result["size"] == "toy"
    return result["cases"]


@pytest.mark.parametrize("part", ["decode", pytest.param("train", marks=pytest.mark.outside)])
def test_ours_is_compared_with_the_textbook_and_the_bound(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    for case in toy(part, capsys, "--repeats", "1"):
        rows = {row["contender"]: row for row in case["rows"]}
        assert list(rows) == ["textbook", "ours", "bound"]
        assert rows["ours"]["difference"] < gate.TOLERANCES["fp32"]
        tokens, ours = case["batch"] * case["tgt_len"], rows["ours"]["seconds"]
        assert part == "decode" or 1 < rows["ours"]["peak_megabytes"] < 100
        assert rows["ours"]["tokens_per_second"] == pytest.approx(tokens / ours, rel=1e-4)
        assert rows["ours"]["ratio"] == pytest.approx(rows["textbook"]["seconds"] / ours, rel=1e-4)
        assert rows["ours"]["share_of_bound"] == pytest.approx(rows["bound"]["seconds"] / ours, rel=1e-4)


@pytest.mark.outside
def test_the_op_runs_as_a_toy(capsys: pytest.CaptureFixture[str]) -> None:
    assert {row["contender"] for row in toy("op", capsys, "--repeats", "1")[0]["rows"]} >= {"textbook", "strided"}
