"""Checkpoints as the authors' and NVIDIA's code pickles them, made of classes whose code is gone when they are read."""

from __future__ import annotations

import re
import sys
import types
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from small_models import VOCAB, small_model
from torch import Tensor, nn

from transformer_xl.config.settings import CorpusConfig, Lengths, RunConfig, TrainConfig, TransformerXLConfig
from transformer_xl.data.vocab import Vocab
from transformer_xl.interop.mapping import entries
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.run.checkpoint import save_checkpoint

BANDS = {"cutoffs": (5, 11), "div_val": 2, "d_embed": 14, "tie_projs": (False, True, True)}
SLICES = {"cutoffs": (5, 11)}
SHAPES = {"plain": {}, "slices": SLICES, "slices, projected": {**SLICES, "d_embed": 6}, "bands": BANDS}
LENGTHS = Lengths(tgt_len=4, mem_len=6, clamp_len=3, attn_len=6)
WORDS = Vocab("word", ("<eos>", *(f"w{i}" for i in range(1, VOCAB - 1)), "<unk>"))


@contextmanager
def classes(**homes: str) -> Iterator[dict[str, type]]:
    """Classes of these names in made-up modules, which are there only as long as the context."""
    made = {}
    for name, home in homes.items():
        base = nn.Module if home in ("mem_transformer", "utils.proj_adaptive_softmax") else object
        parts = home.split(".")
        for depth in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:depth]), types.ModuleType(".".join(parts[:depth])))
        made[name] = type(name, (base,), {"__module__": home})
        setattr(sys.modules[home], name, made[name])
    try:
        yield made
    finally:
        for home in homes.values():
            sys.modules.pop(home, None)
            sys.modules.pop(home.split(".")[0], None)


def to_theirs(state: dict[str, Tensor], config: TransformerXLConfig, *, reverse: bool = True) -> dict[str, Tensor]:
    """Our state dict by the original's names, with tied arrays under each of them."""
    theirs = {}
    for entry in entries(config):
        array = state[entry.ours] if entry.rows is None else state[entry.ours][entry.rows]
        array = array.flip(0) if reverse and entry.theirs.startswith("crit.cluster") else array
        theirs[entry.theirs] = array.squeeze(0) if entry.theirs in ("r_w_bias", "r_r_bias") else array
    return theirs


def put(module: nn.Module, state: dict[str, Tensor], kinds: dict[str, type], make: type) -> nn.Module:
    """Children and parameters of these dotted names; one tensor under two names becomes one parameter."""
    shared: dict[int, nn.Parameter] = {}
    for name, value in state.items():
        *path, last = name.split(".")
        owner = module
        for depth, part in enumerate(path):
            if part not in owner._modules:
                kind = kinds.get(".".join("N" if p.isdecimal() else p for p in path[: depth + 1]), make)
                owner.add_module(part, kind())
            owner = owner._modules[part]
        if last == "inv_freq":
            owner.register_buffer(last, value)
        else:
            owner.register_parameter(last, shared.setdefault(value.data_ptr(), nn.Parameter(value)))
    return module


def authors_module(model: TransformerXL, lengths: Lengths, *, reverse: bool = True) -> nn.Module:
    """The authors' `MemTransformerLM` with the weights of one of ours; to be made inside `classes`."""
    config = model.config
    state = to_theirs(
        {name: p.detach() for name, p in model.state_dict(keep_vars=True).items()}, config, reverse=reverse
    )
    state["pos_emb.inv_freq"] = torch.ones(config.d_model // 2)
    home = sys.modules["mem_transformer"]
    kinds = {"layers": nn.ModuleList, "layers.N.dec_attn": home.RelPartialLearnableMultiHeadAttn}
    module = put(home.MemTransformerLM(), state, kinds, home.Part)
    sizes = ("n_layer", "n_head", "d_model", "d_head")
    vars(module).update({name: getattr(config, name) for name in sizes}, d_embed=config.embed_width, attn_type=0)
    window = lengths.attn_len is not None
    vars(module).update(tgt_len=lengths.tgt_len, mem_len=lengths.mem_len, ext_len=0, same_length=window)
    vars(module).update(clamp_len=lengths.clamp_len or -1)
    vars(module.word_emb).update(n_token=config.vocab_size, div_val=config.div_val, emb_scale=config.d_model**0.5)
    vars(module.crit).update(cutoffs=[*config.cutoffs, config.vocab_size])
    module.register_parameter("unused", None)
    module.drop = nn.Dropout(config.dropout)
    for layer in module.layers:
        layer.dec_attn.dropatt = nn.Dropout(config.dropatt)
        vars(layer.dec_attn).update(pre_lnorm=config.pre_lnorm)
    return module


AUTHORS = {
    "MemTransformerLM": "mem_transformer",
    "RelPartialLearnableMultiHeadAttn": "mem_transformer",
    "Part": "mem_transformer",
}


def vocabulary(kind: type, symbols: Sequence[str], **changes: Any) -> Any:
    """The authors' `Vocab` object with these symbols."""
    vocab = kind()
    vars(vocab).update(counter=Counter(symbols), special=["<eos>"], min_freq=0, max_size=None, lower_case=False)
    vars(vocab).update(delimiter=None, vocab_file=None, idx2sym=list(symbols))
    vars(vocab).update(sym2idx=OrderedDict((symbol, i) for i, symbol in enumerate(symbols)), **changes)
    return vocab


def nvidia_checkpoint(model: TransformerXL, lengths: Lengths) -> dict[str, Any]:
    """NVIDIA's dict for a model of ours, but for the vocabulary: names of their own, tied arrays stored once."""
    config = model.config
    renamed = {}
    for name, value in to_theirs(dict(model.state_dict()), config).items():
        tied = name.startswith("crit.out_layers") and name.endswith("weight") and config.tie_weight
        if not tied and not (name.startswith("crit.out_projs") and config.tie_projs[int(name[-1])]):
            name = re.sub(r"crit\.out_layers\.(\d)\.weight", r"crit.out_layers_weights.\1", name)
            renamed[re.sub(r"crit\.out_layers\.(\d)\.bias", r"crit.out_layers_biases.\1", name)] = value
    sizes = ("n_layer", "n_head", "d_model", "d_head", "d_inner", "dropout", "dropatt", "div_val", "pre_lnorm")
    settings = {name: getattr(config, name) for name in sizes} | {"n_token": config.vocab_size, "ext_len": 0}
    settings |= {"cutoffs": list(config.cutoffs), "d_embed": config.embed_width, "attn_type": 0, "clamp_len": -1}
    settings |= {"tgt_len": lengths.tgt_len, "mem_len": lengths.mem_len, "same_length": lengths.attn_len is not None}
    training = {"optimizer_state": {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": []}, "epoch": 3}
    return {"model_state": renamed, "model_config": settings, "train_step": 40, "best_val_loss": 3.1, **training}


def shuffled(model: torch.nn.Module) -> torch.nn.Module:
    """Every weight drawn anew, those that start at 0 included."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def same(found: torch.nn.Module, model: torch.nn.Module) -> bool:
    states = found.state_dict(), model.state_dict()
    return states[0].keys() == states[1].keys() and all(torch.equal(states[0][n], states[1][n]) for n in states[1])


def bands_state() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    model = shuffled(small_model(dtype=torch.float32, **BANDS))
    return model, to_theirs(dict(model.state_dict()), model.config)


def run_of(model, folder: Path, vocab: Vocab = WORDS, **sections) -> Path:
    train = TrainConfig(tgt_len=4, mem_len=6, attn_len=6)
    config = RunConfig(model=model.config, corpus=CorpusConfig(unit=vocab.unit), train=train, **sections)
    return save_checkpoint(folder, model=model, vocab=vocab, config=config)
