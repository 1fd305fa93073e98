"""Checkpoints of the authors' PyTorch code (github.com/kimiyoung/transformer-xl, pytorch/): a module or state dict."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..config.settings import Lengths, TransformerXLConfig
from ..mistake import Mistake
from ..run import EXPORTED_VOCAB, LoadedModel, write_json
from ..runtime.files import whole_folder
from .mapping import to_theirs
from .pickles import StandIn, module_state, read_pickle
from .source import DIALECTS, Source, is_state
from .vocabulary import read_vocabulary

STATE_DICT = "state_dict.pt"
_MODULE = ("n_layer", "n_head", "d_model", "d_head", "d_embed", "attn_type")
_CALL = ("tgt_len", "mem_len", "ext_len", "clamp_len", "same_length")
_ARGUMENTS = ("vocab_size", "n_layer", "n_head", "d_head", "d_model", "d_inner", "div_val")
_FLAGS = ("pre_lnorm", "dropout", "dropatt", "tie_weight", "cutoffs")


def read_original(path: Path) -> Source:
    """Read `model.pt` or its folder, with `cache.pt` and JSON files in the folder if there are any."""
    file = path if path.is_file() else _checkpoint(path)
    source = Source(path, "original")
    content: Any = read_pickle(file)
    if isinstance(content, StandIn):
        content = _child(content, "module") or content  # in a data-parallel wrapper
        source.state(_settings(content))
        try:
            state: Any = module_state(content)
        except ValueError as error:
            raise Mistake(f"{file}: {error}") from error
    elif isinstance(content, Mapping):
        wrapped = next((name for name in ("model_state_dict", "state_dict") if name in content), None)
        state = content[wrapped] if wrapped else content
        others = [str(name) for name in content if wrapped and name != wrapped]
        source.left_out |= dict.fromkeys(others, "stored beside the state dict")
    else:
        state = None
    if not is_state(state):
        kind = content.name if isinstance(content, StandIn) else f"a {type(content).__name__} of other things"
        raise Mistake(f"{file} must hold a module or its state dict, and holds {kind}. Is it --from nvidia?")
    source.add_state(state, lambda name: name.removeprefix("module."))
    source.state_beside(file.parent)
    vocabularies = [file.parent / name for name in (EXPORTED_VOCAB, "cache.pt")]
    beside = next((vocabulary for vocabulary in vocabularies if vocabulary.is_file()), None)
    source.symbols = partial(read_vocabulary, beside) if beside else None
    return source


def _settings(module: StandIn) -> dict[str, Any]:
    """The hyper-parameters among the attributes of a pickled module."""
    own = module.attributes
    stated = {name: own[name] for name in (*_MODULE, *_CALL) if name in own}
    attention = ("layers", "0", "dec_attn")
    for name, holder, attribute in (
        ("vocab_size", _child(module, "word_emb"), "n_token"),
        ("div_val", _child(module, "word_emb"), "div_val"),
        ("emb_scale", _child(module, "word_emb"), "emb_scale"),
        ("cutoffs", _child(module, "crit"), "cutoffs"),
        ("dropout", _child(module, "drop"), "p"),
        ("dropatt", _child(module, *attention, "dropatt"), "p"),
        ("layer_norm_epsilon", _child(module, *attention, "layer_norm"), "eps"),
        ("pre_lnorm", _child(module, *attention), "pre_lnorm"),
    ):
        if holder is not None and attribute in holder.attributes:
            stated[name] = holder.attributes[attribute]
    return stated


def _child(module: StandIn, *names: str) -> StandIn | None:
    found: Any = module
    for name in names:
        children = found.attributes.get("_modules") if isinstance(found, StandIn) else None
        found = children.get(name) if isinstance(children, Mapping) else None
    return found if isinstance(found, StandIn) else None


def _checkpoint(folder: Path) -> Path:
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no {folder}. Give model.pt, or its folder.")
    found = [folder / name for name in ("model.pt", STATE_DICT) if (folder / name).is_file()]
    if not found:
        raise FileNotFoundError(f"{folder} holds no model.pt. Give the file itself if it has another name.")
    return found[0]


def write_original(loaded: LoadedModel, folder: Path) -> list[str]:
    """Write the state dict of the authors' `MemTransformerLM`, and return notes for the report.

        state_dict.pt              for load_state_dict, tied arrays under each of their names
        args.json                  the arguments of train.py for this model; "evaluation": the lengths of evaluation
        vocab.txt                  a token per line, if no token contains white space
        transformer_xl_vocab.json  the vocabulary, for importing the folder

    Raises:
        ValueError: their code cannot express this model.
    """
    config, train, test = loaded.model.config, loaded.config.train.lengths, loaded.config.eval_lengths
    problems = list(_inexpressible(config))
    if problems:
        raise Mistake(
            f"The original code has no model like this: {'; '.join(problems)}. --model.NAME VALUE changes a setting, "
            "and then the model's numbers change too."
        )
    theirs = to_theirs({name: value.detach().cpu() for name, value in loaded.model.state_dict().items()}, config)
    theirs["pos_emb.inv_freq"] = 10000 ** -(torch.arange(0.0, config.d_model, 2) / config.d_model)
    arguments = {name: getattr(config, name) for name in (*_ARGUMENTS, *_FLAGS)}
    arguments["tie_projs"] = config.tie_projs or [False] * (len(config.cutoffs) + 1)
    arguments |= {"d_embed": config.embed_width, "attn_type": 0, **_call(train), "evaluation": _call(test)}
    symbols = list(map(str, loaded.vocab.symbols))
    with whole_folder(folder) as unfinished:
        torch.save(OrderedDict((name, value.clone()) for name, value in theirs.items()), unfinished / STATE_DICT)
        write_json(unfinished / "args.json", arguments)
        write_json(unfinished / EXPORTED_VOCAB, loaded.vocab.to_json())
        if all(symbol.split() == [symbol] for symbol in symbols):
            (unfinished / "vocab.txt").write_text("\n".join(symbols) + "\n", "utf-8")
    odd = {lengths.attn_len for lengths in (train, test) if lengths.attn_len not in (None, lengths.mem_len)}
    return [f"attn_len {window} became same_length, which is mem_len keys there." for window in odd]


def _call(lengths: Lengths) -> dict[str, Any]:
    """Lengths with the authors' names."""
    sizes = {"tgt_len": lengths.tgt_len, "mem_len": lengths.mem_len, "ext_len": 0}
    return sizes | {"clamp_len": lengths.clamp_len or -1, "same_length": lengths.attn_len is not None}


_LACKS = {
    "share_position_projection": "its positions have a projection of their own",
    "final_norm": "it has no norm after the last layer",
    "qk_norm": "its queries and keys are not normalised",
    "zero_memory": "its memory starts empty",
}


def _inexpressible(config: TransformerXLConfig) -> Iterator[str]:
    if config.kind != "transformer-xl":
        yield f"its model.kind is transformer-xl, and this one's is {config.kind}"
    for name, lack in _LACKS.items():
        if getattr(config, name):
            yield f"{lack}, and this one has model.{name}"
    if config.untie_r and config.n_layer > 1:
        yield "all its layers share one pair of biases, and this one has model.untie_r"
    if config.gate != "none" or config.relu_output:
        yield "it adds the output of a sublayer to its input, and this one has model.gate or model.relu_output"
    if config.ngram_sizes:
        yield "it has no n-grams and matches, and this one has model.ngrams or model.matches"
    if config.layer_norm_epsilon != DIALECTS["original"].layer_norm_epsilon:
        yield f"its model.layer_norm_epsilon is 1e-5, and this one's {config.layer_norm_epsilon}"
    if config.embedding_scale not in (None, config.d_model**0.5):
        yield f"its model.embedding_scale is sqrt(d_model), and this one's {config.embedding_scale}"
