"""The authors' PyTorch code (github.com/kimiyoung/transformer-xl, pytorch/): a pickled module or its state dict."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from transformer_xl.checkpoint import EXPORTED_VOCAB, LoadedModel
from transformer_xl.data.vocab import Vocab
from transformer_xl.files import whole_folder
from transformer_xl.settings import TransformerXLConfig

from .mapping import to_theirs
from .source import DIALECTS, Source, read_json
from .unpickle import StandIn, module_state, read_pickle
from .vocabulary import read_vocabulary

_ARGUMENTS = (
    "n_layer",
    "n_head",
    "d_head",
    "d_model",
    "d_inner",
    "div_val",
    "pre_lnorm",
    "dropout",
    "dropatt",
    "tie_weight",
)
_MODULE = (
    "n_layer",
    "n_head",
    "d_model",
    "d_head",
    "d_embed",
    "tgt_len",
    "mem_len",
    "ext_len",
    "clamp_len",
    "same_length",
    "attn_type",
)

STATE_DICT = "state_dict.pt"


def read_original(path: Path) -> Source:
    """Read `model.pt`, or the folder it lies in, with a `cache.pt` beside it if there is one."""
    file = path if path.is_file() else _checkpoint(path)
    source = Source(path, "original")
    content = read_pickle(file)
    if isinstance(content, StandIn):
        content = _inner(content)
        source.stated = module_settings(content)
        state: Any = module_state(content)
    else:
        state = (
            content.get("model_state_dict", content.get("state_dict", content))
            if isinstance(content, Mapping)
            else None
        )
    if not is_state(state):
        raise ValueError(f"{file} must hold a module or its state dict, and holds {_kind(content)}.")
    source.stated |= stated_beside(file.parent)
    add_parameters(source, state, lambda name: name.removeprefix("module."))
    if (file.parent / EXPORTED_VOCAB).is_file():
        source.vocab = Vocab.from_json(read_json(file.parent / EXPORTED_VOCAB))
    elif (file.parent / "cache.pt").is_file():
        source.vocab, source.notes = read_vocabulary(file.parent / "cache.pt")
    return source


def is_state(content: Any) -> TypeGuard[Mapping[str, Tensor]]:
    """Whether that is a state dict: names and tensors."""
    return (
        isinstance(content, Mapping) and bool(content) and all(isinstance(value, Tensor) for value in content.values())
    )


def add_parameters(source: Source, state: Mapping[str, Tensor], original: Callable[[str], str] = str) -> None:
    """Take a state dict whose names `original` turns into the original's."""
    for name, array in state.items():
        canonical = original(name)
        if canonical == "pos_emb.inv_freq":
            source.left_out[name] = "as encodings of positions are computed"
        else:
            source.add(name, canonical, array)


def module_settings(module: StandIn) -> dict[str, Any]:
    """What a pickled module says of itself."""
    own = module.attributes
    stated = {name: own[name] for name in _MODULE if name in own}
    embedding, softmax, layer = (
        _child(module, *names) for names in (("word_emb",), ("crit",), ("layers", "0", "dec_attn"))
    )
    for name, holder, attribute in (
        ("vocab_size", embedding, "n_token"),
        ("div_val", embedding, "div_val"),
        ("emb_scale", embedding, "emb_scale"),
        ("cutoffs", softmax, "cutoffs"),
        ("dropout", _child(module, "drop"), "p"),
        ("dropatt", _child(module, "layers", "0", "dec_attn", "dropatt"), "p"),
        ("layer_norm_epsilon", _child(module, "layers", "0", "dec_attn", "layer_norm"), "eps"),
        ("pre_lnorm", layer, "pre_lnorm"),
    ):
        if holder is not None and attribute in holder.attributes:
            stated[name] = holder.attributes[attribute]
    return stated


def stated_beside(folder: Path) -> dict[str, Any]:
    """The hyper-parameters in JSON files beside a checkpoint, `corpus-info.json` among them."""
    stated: dict[str, Any] = {}
    for file in sorted(folder.glob("*.json")):
        stated |= read_json(file) if file.name != EXPORTED_VOCAB else {}
    return stated


def _inner(module: StandIn) -> StandIn:
    """The model in a data-parallel wrapper, or itself."""
    return _child(module, "module") or module


def _child(module: StandIn, *names: str) -> StandIn | None:
    found: Any = module
    for name in names:
        children = found.attributes.get("_modules") if isinstance(found, StandIn) else None
        found = children.get(name) if isinstance(children, Mapping) else None
    return found if isinstance(found, StandIn) else None


def _checkpoint(folder: Path) -> Path:
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no {folder}. Give model.pt, or the folder it lies in.")
    found = [folder / name for name in ("model.pt", STATE_DICT) if (folder / name).is_file()]
    if not found:
        raise FileNotFoundError(f"{folder} holds no model.pt. Give the file itself if it has another name.")
    return found[0]


def _kind(content: Any) -> str:
    return content.name if isinstance(content, StandIn) else f"a {type(content).__name__} of other things"


def write_original(loaded: LoadedModel, folder: Path) -> list[str]:
    """Write the state dict of the authors' `MemTransformerLM`, and return what else there is to know.

        state_dict.pt              for load_state_dict, tied arrays under each of their names
        args.json                  the arguments of train.py that make the model
        vocab.txt                  a symbol a line, where lines can hold them
        transformer_xl_vocab.json  the symbols, for the way back

    Raises:
        ValueError: the model has something that their code has not.
    """
    config, lengths = loaded.model.config, loaded.config.eval_lengths
    state = {name: value.detach().cpu() for name, value in loaded.model.state_dict().items()}
    problems = list(_inexpressible(config))
    if problems:
        raise ValueError(f"The original code has no model like this: {'; '.join(problems)}.")
    theirs = to_theirs(state, config, reverse=True)
    theirs["pos_emb.inv_freq"] = 10000 ** -(torch.arange(0.0, config.d_model, 2) / config.d_model)
    arguments = {name: getattr(config, name) for name in _ARGUMENTS}
    arguments |= {"vocab_size": config.vocab_size, "cutoffs": list(config.cutoffs), "d_embed": config.embed_width}
    arguments |= {"tgt_len": lengths.tgt_len, "mem_len": lengths.mem_len, "ext_len": 0, "attn_type": 0}
    same_length = lengths.attn_len is not None
    arguments |= {"clamp_len": lengths.clamp_len or -1, "same_length": same_length}
    symbols = list(map(str, loaded.vocab.symbols))
    with whole_folder(folder) as unfinished:
        torch.save(OrderedDict((name, value.clone()) for name, value in theirs.items()), unfinished / STATE_DICT)
        (unfinished / "args.json").write_text(json.dumps(arguments, indent=1) + "\n")
        (unfinished / EXPORTED_VOCAB).write_text(json.dumps(loaded.vocab.to_json(), ensure_ascii=False) + "\n", "utf-8")
        if all(symbol.split() == [symbol] for symbol in symbols):
            (unfinished / "vocab.txt").write_text("\n".join(symbols) + "\n", "utf-8")
    notes = []
    if config.zero_memory:
        notes.append("Its memory started as zeros that are attended; the original code starts with none.")
    if same_length and lengths.attn_len != lengths.mem_len:
        notes.append(
            f"attn_len {lengths.attn_len} became same_length, which is mem_len = {lengths.mem_len} keys there."
        )
    return notes


def _inexpressible(config: TransformerXLConfig) -> Iterator[str]:
    if config.untie_r and config.n_layer > 1:
        yield "model.untie_r must be false, for all its layers share one pair of biases"
    if config.final_norm:
        yield "model.final_norm must be false"
    if config.layer_norm_epsilon != DIALECTS["original"].layer_norm_epsilon:
        yield f"model.layer_norm_epsilon must be 1e-5, and is {config.layer_norm_epsilon}"
    if config.embedding_scale not in (None, config.d_model**0.5):
        yield f"model.embedding_scale must be sqrt(d_model), and is {config.embedding_scale}"
