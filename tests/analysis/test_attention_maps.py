"""Attention maps: the attention of the model and of each term, and averages that do not depend on the segments."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import BASELINES, VARIANTS, lengths, small_model, text
from torch import nn

from transformer_xl.analysis.attention import (
    AverageAttention,
    Maps,
    average_attention,
    position_attention,
    seen_by_distance,
    terms_by_distance,
    watch_attention,
)
from transformer_xl.analysis.figures import draw_by_distance, draw_targets
from transformer_xl.commands.attention import Attention
from transformer_xl.config.settings import Lengths, RunConfig, TrainConfig
from transformer_xl.data.loader import StreamLoader
from transformer_xl.data.vocab import Vocab
from transformer_xl.ops.masks import Mask, visible
from transformer_xl.ops.reference import scores_by_term
from transformer_xl.run.checkpoint import save_checkpoint

OTHERS = {"zero memory": {"zero_memory": True}, "shared projection": {"share_position_projection": True}}
MODELS: dict[str, dict[str, Any]] = VARIANTS | BASELINES | OTHERS


def by_key(maps: torch.Tensor, keys: int) -> torch.Tensor:
    """Columns of distances as columns of keys, 0 where there is none."""
    *_, T, columns = maps.shape
    out = maps.new_zeros(*maps.shape[:-1], keys)
    for i in range(T):
        last = keys - T + i
        count = min(columns, last + 1)
        out[..., i, last + 1 - count : last + 1] = maps[..., i, :count].flip(-1)
    return out


@settings(max_examples=examples(20))
@given(
    st.integers(1, 5),
    st.integers(0, 6),
    st.none() | st.integers(1, 7),
    st.none() | st.lists(st.integers(-2, 6), min_size=2, max_size=2),
)
def test_terms_and_masks_equal_the_reference(T: int, M: int, attn_len: int | None, valid: list[int] | None):
    S, rows = M + T, None if valid is None else torch.tensor(valid).clamp(max=M)
    generator = torch.Generator().manual_seed(T)
    shapes = [(2, 3, T, 5), (2, 3, S, 5), (3, S + 2, 5), (3, 5), (3, 5)]
    given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    columns = S if attn_len is None else min(S, attn_len)
    seen = seen_by_distance(T, S, columns, None if rows is None else M - rows[:, None])
    hidden = visible(T, S, Mask.of(M, attn_len, rows))
    assert torch.equal(by_key(seen.double(), S).bool(), hidden)
    ours = by_key(terms_by_distance(*given, columns), S)
    torch.testing.assert_close(ours * hidden, torch.stack(scores_by_term(*given)) * hidden)


def attended(model: nn.Module, ids: torch.Tensor, memory: Any, call: Lengths) -> tuple[Any, list[Any], list[Any]]:
    """A call, the maps it made, and what each layer's heads gave: the values they attended, summed."""
    maps: list[Maps] = []
    given: list[Any] = []
    heads: list[torch.Tensor] = []
    hooks = []
    for layer in model.backbone.layers:  # type: ignore[arg-type]
        attention = layer.attention
        hooks.append(attention.output.register_forward_pre_hook(lambda _, args: heads.append(args[0])))
        hooks.append(layer.register_forward_pre_hook(lambda module, args: given.append((module.attention, *args[:2]))))
    with watch_attention(model, maps.append), torch.no_grad():  # type: ignore[arg-type]
        _, memory = model.hidden(ids, memory, call)  # type: ignore[operator]
    for hook in hooks:
        hook.remove()
    values = []
    for module, x, past in given:
        values.append(module.heads(x, past)[2])
    return memory, list(zip(maps, values, strict=True)), heads


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("attn_len", [None, 4])
def test_maps_equal_the_attention_of_the_model(changes: dict[str, Any], attn_len: int | None):
    model = small_model(**changes)
    clamp_len = 3 if changes.get("kind") not in ("vaswani", "al-rfou") else None
    call, memory = lengths(6, attn_len, clamp_len), None
    if model.takes_padding:
        memory = model.empty_memory(3, call, torch.tensor([0, -2, 0]))
    for part in text(3, 15).split((5, 3, 7), dim=1):
        memory, found, heads = attended(model, part, memory, call)
        assert len(found) == 3
        for (maps, v), gave in zip(found, heads, strict=True):
            p = by_key(maps.probability[0], v.shape[2])
            torch.testing.assert_close((p @ v).transpose(1, 2).flatten(2), gave)
            sees = maps.seen.any(-1).expand(p.shape[:3]).double()
            for kind in maps.probability:
                torch.testing.assert_close(kind.sum(-1), sees)
            together = maps.probability[1:].prod(0)  # the softmax of a sum
            torch.testing.assert_close(together / together.sum(-1, keepdim=True).clamp(min=1e-99), maps.probability[0])


def test_watch_attention_leaves_the_model_unchanged():
    model, ids = small_model(), text(2, 5)
    before = model.hidden(ids, None, lengths(4))[0]
    with watch_attention(model, lambda maps: None):
        torch.testing.assert_close(model.hidden(ids, None, lengths(4))[0], before, rtol=0, atol=0)
    assert not any(module._forward_pre_hooks for module in model.modules())


def averaged(model: nn.Module, ids: np.ndarray, call: Lengths, batch_size: int = 2) -> AverageAttention:
    return average_attention(model, StreamLoader(ids, batch_size=batch_size, tgt_len=call.tgt_len), call)  # type: ignore[arg-type]


def test_averages_equal_those_of_all_maps_at_once():
    """Rows are not of one length: what pads the shortest is not counted."""
    model, M, T = small_model(untie_r=True), 7, 5
    loader = StreamLoader(text(1, 42)[0].numpy(), batch_size=3, tgt_len=T)
    with patch("transformer_xl.analysis.attention.BLOCK", 1):
        ours = average_attention(model, loader, Lengths(tgt_len=T, mem_len=M))
    sums, counts, beyond, nats = np.zeros((5, 3, 2, M + T)), np.zeros(M + T), np.zeros((3, 2)), np.zeros((3, 2))
    memory = None
    for ids, targets, _ in loader:
        memory, found, _ = attended(model, ids, memory, lengths(M))
        for layer, (maps, v) in enumerate(found):
            kinds = by_key(maps.probability, v.shape[2]).numpy()
            past = v.shape[2] - ids.shape[1]
            for row, i in (targets >= 0).nonzero().tolist():
                for j in range(past + i + 1):
                    p = kinds[0, row, :, i, j]
                    sums[:, layer, :, past + i - j] += kinds[:, row, :, i, j]
                    counts[past + i - j] += layer == 0
                    beyond[layer] += p * (j < past)
                    nats[layer] -= p * np.log(p)
    assert ours.queries == 41
    np.testing.assert_allclose(ours.sums, sums)
    np.testing.assert_array_equal(ours.counts, counts)
    np.testing.assert_allclose(ours.probability, sums / np.maximum(counts, 1))
    np.testing.assert_allclose(ours.beyond_segment, beyond / 41)
    np.testing.assert_allclose(ours.entropy, nats / 41)
    np.testing.assert_allclose(ours.mean_distance, sums[0] @ np.arange(M + T) / 41)
    np.testing.assert_allclose(ours.sums.sum(-1), 41, err_msg="each query gives out one in all")


@settings(max_examples=examples(8))
@given(st.integers(1, 9), st.integers(1, 400), st.integers(3, 40))
def test_segments_and_blocks_do_not_change_an_average(tgt_len: int, block: int, length: int):
    model, ids = small_model(n_layer=2, pre_lnorm=True), text(1, length)[0].numpy()
    one = averaged(model, ids, Lengths(tgt_len=7, mem_len=5, attn_len=6))
    with patch("transformer_xl.analysis.attention.BLOCK", block):
        other = averaged(model, ids, Lengths(tgt_len=tgt_len, mem_len=5, attn_len=6))
    assert one.queries == other.queries
    for name in ("sums", "counts", "mean_distance", "entropy"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-9, atol=1e-12, err_msg=name)


def test_a_document_does_not_attend_to_the_previous_one():
    model, ids, call = small_model(), text(1, 22)[0].numpy(), Lengths(tgt_len=4, mem_len=6)
    both = average_attention(model, StreamLoader(ids, batch_size=1, tgt_len=4, documents=[0, 9]), call)
    each = [averaged(model, part, call, 1) for part in (ids[:9], ids[9:])]
    np.testing.assert_allclose(both.sums, each[0].sums + each[1].sums)
    np.testing.assert_array_equal(both.counts, each[0].counts + each[1].counts)


def test_what_only_late_layers_or_matches_reach_is_read_before_a_token():
    ids = text(1, 90)[0].numpy()
    models = [small_model(n_layer=4), small_model(n_layer=2, matches=(1,), match_window=50, ngram_width=6)]
    for model, call in zip(models, [Lengths(tgt_len=7, mem_len=3), Lengths(tgt_len=4, mem_len=6)], strict=True):
        memory = None
        for part in torch.from_numpy(ids[None, :80]).split(call.tgt_len, dim=1):
            _, memory = model.hidden(part, memory, call)
        _, found, _ = attended(model, torch.from_numpy(ids[None, 80:81]), memory, call)
        expected = np.stack([maps.probability[0, 0, :, 0].flip(-1) for maps, _ in found])
        np.testing.assert_allclose(position_attention(model, ids, 80, call).probability, expected, atol=1e-12)


def test_context_that_is_read_again_is_seen():
    model, ids, call = small_model(), text(1, 40)[0].numpy(), Lengths(tgt_len=4, mem_len=0)
    seen = position_attention(model, ids, 30, call, context_len=19)  # more than the layers reach in segments
    assert seen.ids.tolist() == ids[11:31].tolist() and not seen.to_memory.size
    _, found, _ = attended(model, torch.from_numpy(ids[None, 11:31]), None, call)
    for layer, (maps, _) in enumerate(found):
        np.testing.assert_allclose(seen.probability[layer], maps.probability[0, 0, :, -1].flip(-1), atol=1e-12)
    loader = StreamLoader(ids, batch_size=1, tgt_len=4, context_len=9)
    average = average_attention(model, loader, call, context_len=9)
    assert average.queries == 39 and average.counts.nonzero()[0].max() == 12


@pytest.mark.parametrize(("position", "start"), [(1, 0), (4, 0), (30, 0), (30, 27)])
def test_glance_is_the_attention_of_a_token_after_its_memory(position: int, start: int):
    """Tokens that the layers cannot reach make no difference."""
    model, ids, call = small_model(n_layer=2), text(1, 40)[0].numpy(), Lengths(tgt_len=4, mem_len=6, attn_len=5)
    seen = position_attention(model, ids, position, call, count=3, start=start)
    memory = None
    for part in torch.from_numpy(ids[None, start:position]).split(4, dim=1):
        _, memory = model.hidden(part, memory, call)
    _, found, _ = attended(model, torch.from_numpy(ids[None, position : position + 3]), memory, call)
    count = min(4, position - start) + 1
    assert seen.ids.tolist() == ids[position + 1 - count : position + 1].tolist()
    assert seen.top().sum(-1).tolist() == [[-(-(count - 1) // 5)] * 2] * 2 and seen.top().shape[-1] == count - 1
    assert seen.targets.tolist() == ids[position : position + 3].tolist()
    memory_seen, top = seen.probability[..., :-1], seen.top()
    assert (memory_seen.min(-1, where=top, initial=1) >= memory_seen.max(-1, where=~top, initial=0)).all()
    np.testing.assert_allclose(seen.probability.sum(-1), 1)
    for layer, (maps, _) in enumerate(found):
        np.testing.assert_allclose(seen.probability[layer], maps.probability[0, 0, :, 0, :count].flip(-1), atol=1e-12)
        for query, back in product(range(3), range(count - 1)):
            distance, row = query + 1 + back, maps.probability[0, 0, :, query]
            wanted = row[:, distance] if distance < row.shape[-1] else torch.zeros(2)  # beyond attn_len
            np.testing.assert_allclose(seen.to_memory[layer, :, query, count - 2 - back], wanted, atol=1e-12)


WORDS = "the cat sat on the mat and cost $ 5 in 日本 for the dog ate the cat\n" * 20
VOCAB = Vocab.build("word", [WORDS])


def run_in(folder: Path, **shape: Any) -> Path:
    """A folder with a run over words and its text."""
    (folder / "text.txt").write_text(WORDS)
    model = small_model(vocab_size=len(VOCAB), dtype=torch.float32, **shape)
    config = RunConfig(train=TrainConfig(tgt_len=8, mem_len=10))
    save_checkpoint(folder / "run", model=model, vocab=VOCAB, config=config)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_in(tmp_path_factory.mktemp("home"))


def looked(home: Path, out: Path | None, **options: Any) -> dict[str, Any]:
    given = {"data": str(home / "text.txt"), "split": "train", "precision": "fp32", "out": out} | options
    Attention(home / "run", **given).run()
    return json.loads(((out or home / "run" / "attention") / "attention.json").read_text())


def test_the_command_writes_pictures_arrays_and_their_names(home: Path, tmp_path: Path, capsys):
    facts = looked(home, tmp_path, heads=("2.1", "3.2"), positions=(9, 40), max_tokens=150, json=True)
    told = json.loads(capsys.readouterr().out)
    names = ["average", "terms", "targets-9", "targets-40"]
    assert told.pop("files") == [str(tmp_path / f"{name}.{form}") for name in names for form in ("png", "svg")]
    assert told == facts == json.loads((tmp_path / "attention.json").read_text())
    for name in names:
        assert (tmp_path / f"{name}.png").read_bytes()[1:4] == b"PNG"
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
    with np.load(tmp_path / "attention.npz", allow_pickle=False) as arrays:
        sizes = dict(zip(facts["axes"]["sums"], arrays["sums"].shape, strict=True))
        assert "allow_pickle" not in arrays  # NumPy before 2.1 stores this argument of savez
        assert sizes == {"kind": len(facts["kinds"]), "layer": 3, "head": 2, "distance": 18}
        np.testing.assert_allclose(arrays["sums"].sum(-1), facts["queries"], rtol=1e-5)
        np.testing.assert_allclose(arrays["sums"] / np.maximum(arrays["counts"], 1), arrays["probability"])
        mean = arrays["sums"][0] @ np.arange(18) / facts["queries"]
        assert [head["mean_distance_tokens"] for head in facts["heads"]] == pytest.approx(mean.ravel().tolist())
        for look in facts["positions"]:
            assert arrays[look["array"]].shape == (3, 2, len(look["tokens"]))
            assert list(look["top"]) == ["2.1", "3.2"]
    assert facts["queries"] == 150 and facts["lengths"]["mem_len"] == 10
    symbols = [word for line in WORDS.splitlines() for word in [*line.split(), "¶"]]
    assert facts["positions"][1]["tokens"] == symbols[30:41]


def test_the_command_prints_a_table_and_has_default_heads_positions_and_folder(home: Path, capsys):
    facts, folder = looked(home, None, mem_len=5, tgt_len=4), home / "run" / "attention"
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[2:5]] == ["1", "2", "3"]
    assert "beyond segment" in printed and str(folder) in printed
    assert {file.name for file in folder.iterdir()} >= {"attention.json", "average.png"}
    assert printed.splitlines()[-1].startswith("Pictures and arrays are in")
    assert list(folder.glob("targets-*"))
    looked(home, None, mem_len=0, tgt_len=4, positions=(9,))
    assert not list(folder.glob("targets-*")), "there is no memory to attend to"
    [look] = facts["positions"]
    furthest = sorted(facts["heads"], key=lambda head: -head["mean_distance_tokens"])[:3]
    assert list(look["top"]) == [head["head"] for head in furthest]
    assert facts["lengths"]["mem_len"] == 5 and facts["lengths"]["tgt_len"] == 4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"heads": ("4.1",)}, r"--heads must be layer.head, from 1.1 to 3.2, got '4.1'"),
        ({"heads": ("0.1",)}, "got '0.1'"),
        ({"heads": ("2",)}, "got '2'"),
        ({"positions": (0,)}, "--positions must be at least 1 and at most"),
        ({"positions": (10**6,)}, r"--positions must be .* got 1000000"),
        ({"max_tokens": -1}, "--max-tokens must be at least 0, got -1"),
        ({"tgt_len": 0}, "--tgt-len must be at least 1, got 0"),
    ],
)
def test_impossible_options_are_refused(home: Path, tmp_path: Path, options: dict, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        looked(home, tmp_path, **options)


def test_a_model_without_attention_is_refused():
    with pytest.raises(ValueError, match=r'or "al-rfou", and the model is of kind "lstm"'):
        averaged(small_model(kind="lstm"), text(1, 9)[0].numpy(), Lengths(tgt_len=4, mem_len=3))


def test_pictures_allow_many_heads_long_words_and_any_character(tmp_path: Path):
    rng = np.random.default_rng(0)
    panel = rng.dirichlet(np.ones(33), (6, 8))
    tokens = ["$x_1$", "word" * 4] + ["日"] * 38
    paths = draw_by_distance(tmp_path / "average", {"all": panel}, "title", panel @ np.arange(33.0))
    heads, marked = {"head": rng.dirichlet(np.ones(40), 3)}, [rng.random((3, 40)) < 0.2]
    paths += draw_targets(tmp_path / "targets", tokens[:3], tokens, heads, marked, "title")
    assert len(paths) == 4 and all(path.stat().st_size > 1000 for path in paths)


def test_a_token_that_ends_documents_hides_what_is_before_it(tmp_path: Path, monkeypatch):
    """As where documents are apart: the token begins its document."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # draws nothing
    home = run_in(tmp_path, document_end=VOCAB.id_of("and"))
    for look in looked(home, None, positions=(11, 33))["positions"]:
        assert look["tokens"][0] == "and" and "and" not in look["tokens"][1:], "the last document alone"


def test_a_missing_matplotlib_is_named_in_one_sentence(home: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert looked(home, tmp_path, max_tokens=50)["queries"] == 50
    shown = capsys.readouterr()
    assert "pip install matplotlib" in shown.err and shown.out.splitlines()[-1] == f"Arrays are in {tmp_path}."
