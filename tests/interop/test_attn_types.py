"""The original code's attn_type 1 to 3: checkpoints of these become baselines that give the numbers of their home."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign import classes, put
from torch import Tensor, nn

from transformer_xl.checkpoint import LoadedModel
from transformer_xl.data.vocab import Vocab
from transformer_xl.interop import read_model, write_original

LAYERS, HEADS, SIZE, WIDTH, INNER, WORDS = 2, 2, 3, 6, 5, 11
T, M = 4, 5


def checkpoint(number: int, rows: int = T) -> dict[str, Tensor]:
    """A state dict with the authors' names; `rows` is their max_klen."""
    torch.manual_seed(number)

    def draw(*shape: int) -> Tensor:
        return 0.5 * torch.randn(shape, dtype=torch.float64)

    table = draw(WORDS, WIDTH)
    state = {"word_emb.emb_layers.0.weight": table, "crit.out_layers.0.weight": table}
    state["crit.out_layers.0.bias"] = draw(WORDS)
    for name in (f"layers.{layer}." for layer in range(LAYERS)):
        if number == 1:
            state[f"{name}dec_attn.qkv_net.weight"] = draw(3 * HEADS * SIZE, WIDTH)
        else:
            state[f"{name}dec_attn.q_net.weight"] = draw(HEADS * SIZE, WIDTH)
            state[f"{name}dec_attn.kv_net.weight"] = draw(2 * HEADS * SIZE, WIDTH)
        state[f"{name}dec_attn.o_net.weight"] = draw(WIDTH, HEADS * SIZE)
        for norm in ("dec_attn.layer_norm", "pos_ff.layer_norm"):
            state |= {f"{name}{norm}.weight": 1 + draw(WIDTH), f"{name}{norm}.bias": draw(WIDTH)}
        state |= {f"{name}pos_ff.CoreNet.0.weight": draw(INNER, WIDTH), f"{name}pos_ff.CoreNet.0.bias": draw(INNER)}
        state |= {f"{name}pos_ff.CoreNet.3.weight": draw(WIDTH, INNER), f"{name}pos_ff.CoreNet.3.bias": draw(WIDTH)}
    if number == 1:
        state |= {"r_bias": draw(LAYERS, rows, HEADS), "r_w_bias": draw(LAYERS, HEADS, SIZE)}
    if number in (1, 3):
        state["r_emb"] = draw(LAYERS, rows, HEADS, SIZE)
    return state


class Home:
    """The authors' forward pass for one stream, by index; `memory` is what their layers read of earlier segments."""

    def __init__(self, number: int, state: dict[str, Tensor], *, clamp_len: int = -1, pre_lnorm: bool = False):
        self.number, self.clamp_len, self.pre_lnorm = number, clamp_len, pre_lnorm
        self.w = {name: value.numpy() for name, value in state.items()}
        self.memory = [np.zeros((0, WIDTH)) for _ in range(LAYERS)]

    def read(self, ids: list[int], mem_len: int, window: int | None = None) -> np.ndarray:
        """Log-probabilities [T, V] of one segment."""
        x = self.w["word_emb.emb_layers.0.weight"][ids] * math.sqrt(WIDTH)
        if self.number == 2:  # places are counted from the segment's end
            x = x + np.array([self.sinusoid(len(ids) - 1 - i) for i in range(len(ids))])
        for layer in range(LAYERS):
            if self.number == 3:  # a segment has the last rows of the table
                x = x + self.w["r_emb"][layer][-len(ids) :].reshape(len(ids), WIDTH)
            past, context = len(self.memory[layer]), np.concatenate([self.memory[layer], x])
            self.memory[layer] = context[max(len(context) - mem_len, 0) :]
            x = np.array([self.layer(layer, context[: past + i + 1], window) for i in range(len(ids))])
        scores = x @ self.w["crit.out_layers.0.weight"].T + self.w["crit.out_layers.0.bias"]
        return scores - np.log(np.exp(scores).sum(-1, keepdims=True))

    def layer(self, layer: int, context: np.ndarray, window: int | None) -> np.ndarray:
        """What a layer gives for the last of these positions."""
        w, name = self.w, f"layers.{layer}."
        read = self.norm(f"{name}dec_attn.layer_norm", context) if self.pre_lnorm else context
        if self.number == 1:
            q, k, v = np.split(w[f"{name}dec_attn.qkv_net.weight"], 3)
        else:
            q, (k, v) = w[f"{name}dec_attn.q_net.weight"], np.split(w[f"{name}dec_attn.kv_net.weight"], 2)
        heads = []
        for head in range(HEADS):
            rows = slice(head * SIZE, (head + 1) * SIZE)
            query = q[rows] @ read[-1]
            seen = range(max(0, len(context) - (window or len(context))), len(context))
            scores = [self.score(layer, head, query, k[rows] @ read[j], len(context) - 1 - j) for j in seen]
            share = np.exp(np.array(scores) / math.sqrt(SIZE))
            heads.append((share / share.sum()) @ np.array([v[rows] @ read[j] for j in seen]))
        x = context[-1] + w[f"{name}dec_attn.o_net.weight"] @ np.concatenate(heads)
        x = x if self.pre_lnorm else self.norm(f"{name}dec_attn.layer_norm", x)
        inner = self.norm(f"{name}pos_ff.layer_norm", x) if self.pre_lnorm else x
        inner = np.maximum(w[f"{name}pos_ff.CoreNet.0.weight"] @ inner + w[f"{name}pos_ff.CoreNet.0.bias"], 0)
        x = x + w[f"{name}pos_ff.CoreNet.3.weight"] @ inner + w[f"{name}pos_ff.CoreNet.3.bias"]
        return x if self.pre_lnorm else self.norm(f"{name}pos_ff.layer_norm", x)

    def score(self, layer: int, head: int, query: np.ndarray, key: np.ndarray, distance: int) -> float:
        if self.number != 1:
            return query @ key
        rows = self.w["r_emb"].shape[1]
        known = rows if self.clamp_len <= 0 else min(self.clamp_len, rows)
        row = rows - 1 - min(distance, known - 1)
        u, b = self.w["r_w_bias"][layer, head], self.w["r_bias"][layer, row, head]
        return (query + u) @ key + query @ self.w["r_emb"][layer, row, head] + b

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def sinusoid(self, place: int) -> list[float]:
        angles = [place / 10000 ** (2 * i / WIDTH) for i in range(WIDTH // 2)]
        return [math.sin(a) for a in angles] + [math.cos(a) for a in angles]


def saved(folder: Path, state: dict[str, Tensor], **stated: Any) -> Path:
    torch.save(state, folder / "model.pt")
    (folder / "args.json").write_text(json.dumps(stated))
    return folder


def ours(found: Any, pieces: list[list[int]]) -> np.ndarray:
    model, memory, logs = found.model(), None, []
    with torch.no_grad():
        for piece in pieces:
            out, memory = model.log_probs(torch.tensor([piece]), memory, found.config.eval_lengths)
            logs.append(out[0])
    return torch.cat(logs).numpy()


def pieces(*sizes: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, WORDS, size).tolist() for size in sizes]


@pytest.mark.parametrize("clamp_len", [-1, 3, 20])
@pytest.mark.parametrize("rows", [T + M, 6])
@pytest.mark.parametrize("pre_lnorm", [False, True])
def test_attn_type_1(tmp_path: Path, clamp_len: int, rows: int, pre_lnorm: bool) -> None:
    state = checkpoint(1, rows)
    stated = {"attn_type": 1, "tgt_len": T, "mem_len": M, "clamp_len": clamp_len, "pre_lnorm": pre_lnorm}
    found = read_model(saved(tmp_path, state, **stated), "original")
    assert (found.config.model.kind, found.config.model.positions) == ("shaw", rows)
    home, text = Home(1, state, clamp_len=clamp_len, pre_lnorm=pre_lnorm), pieces(T, T, T, 2)
    expected = np.concatenate([home.read(piece, M) for piece in text])
    np.testing.assert_allclose(ours(found, text), expected, rtol=1e-10, atol=1e-12)


def test_attn_type_1_with_same_length(tmp_path: Path) -> None:
    state = checkpoint(1, T + M)
    found = read_model(saved(tmp_path, state, tgt_len=T, mem_len=M, same_length=True), "original")
    assert found.config.eval_lengths.attn_len == M
    home, text = Home(1, state), pieces(T, T, T, T)
    expected = np.concatenate([home.read(piece, M, M) for piece in text])
    np.testing.assert_allclose(ours(found, text), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("number", [2, 3])
def test_attn_types_2_and_3_without_memory(tmp_path: Path, number: int) -> None:
    state = checkpoint(number)
    stated = {"attn_type": number, "tgt_len": T, "mem_len": 0, "n_head": HEADS, "clamp_len": 400}
    found = read_model(saved(tmp_path, state, **stated), "original")
    assert found.config.model.kind == ("vaswani" if number == 2 else "al-rfou")
    assert found.config.eval_lengths == replace(found.config.train.lengths, tgt_len=T, mem_len=0, clamp_len=None)
    home, text = Home(number, state), pieces(T, T, T)
    expected = np.concatenate([home.read(piece, 0) for piece in text])
    np.testing.assert_allclose(ours(found, text), expected, rtol=1e-10, atol=1e-12)
    # A shorter segment's places are at home those of a full one's end, here those of its start.
    short = pieces(2)
    assert not np.isclose(ours(found, short), home.read(short[0], 0)).all(-1).any()


@pytest.mark.parametrize("number", [1, 3])
def test_what_is_not_stated_follows_from_the_arrays(tmp_path: Path, number: int) -> None:
    found = read_model(saved(tmp_path, checkpoint(number)), "original")
    assert (found.config.model.n_head, found.config.model.d_head, found.config.model.positions) == (HEADS, SIZE, T)
    assert number == 1 or (found.config.train.tgt_len, found.config.train.mem_len) == (T, 0)


def test_a_pickled_module_of_attn_type_2_says_what_its_arrays_do_not(tmp_path: Path) -> None:
    state = checkpoint(2)
    with classes(MemTransformerLM="mem_transformer", MultiHeadAttn="mem_transformer", Part="mem_transformer"):
        home = sys.modules["mem_transformer"]
        kinds = {"layers": nn.ModuleList, "layers.N.dec_attn": home.MultiHeadAttn}
        module = put(home.MemTransformerLM(), state | {"pos_emb.inv_freq": torch.ones(3)}, kinds, home.Part)
        vars(module).update(n_head=HEADS, d_head=SIZE, attn_type=2, tgt_len=T, mem_len=0, ext_len=0, clamp_len=-1)
        for layer in module.layers:
            vars(layer.dec_attn).update(pre_lnorm=False)
        torch.save(module, tmp_path / "model.pt")
    found, text = read_model(tmp_path, "original"), pieces(T, T)
    expected = np.concatenate([Home(2, state).read(piece, 0) for piece in text])
    np.testing.assert_allclose(ours(found, text), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("number", "stated", "complaint"),
    [
        (1, {"clamp_len": 1}, "clamp_len is 1, with which its attn_type 1 has one distance"),
        (1, {"attn_type": 3}, "attn_type is 3 in args.json and 1 by its arrays"),
        (2, {}, "arrays do not tell n_head and tgt_len: .* n_head is 0, tgt_len 0"),
        (2, {"n_head": 4, "tgt_len": T}, "heads that share 6 rows; n_head is 4, tgt_len 4"),
        (
            2,
            {"n_head": 2, "tgt_len": T, "mem_len": M},
            "mem_len is 5, and its attn_type 2 adds positions to its memory",
        ),
        (2, {"n_head": 2, "tgt_len": T, "pre_lnorm": True}, "normalises keys and values but no queries"),
        (
            2,
            {"n_head": 2, "tgt_len": T, "clamp_len": 2},
            "clamp_len is 2, which makes places of its tgt_len 4 the same",
        ),
        (3, {"tgt_len": T, "mem_len": M}, "mem_len is 5, and its attn_type 3 adds positions to its memory"),
        (3, {"tgt_len": 3}, "tgt_len is 3, and it has 4 places, those of a memory or of ext_len among them"),
    ],
)
def test_what_has_no_model_here_is_refused(tmp_path: Path, number: int, stated: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_model(saved(tmp_path, checkpoint(number), **stated), "original")


def test_other_programs_and_the_way_back_are_refused(tmp_path: Path) -> None:
    torch.save({"model_state": checkpoint(3)}, tmp_path / "nvidia.pt")
    with pytest.raises(ValueError, match=r"must have attn_type 0 .* its arrays are of attn_type 3"):
        read_model(tmp_path / "nvidia.pt", "nvidia")
    found = read_model(saved(tmp_path, checkpoint(1)), "original")
    symbols = Vocab("word", tuple(f"w{i}" for i in range(WORDS)))
    with pytest.raises(ValueError, match=r"model\.kind = transformer-xl, and this one is shaw"):
        write_original(LoadedModel(found.model(), symbols, found.config), tmp_path / "out")
