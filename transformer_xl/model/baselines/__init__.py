"""Every kind of model by its name: Transformer-XL, the paper's baselines, and classes of your own."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...config.settings import TransformerXLConfig
from ...config.shape import KINDS, own_kinds
from ...mistake import Mistake
from ..transformer_xl import TransformerXL, TransformerXLBackbone
from .positions import AlRfou, Shaw, Vaswani
from .recurrent import LSTM, QRNN

_BACKBONES = TransformerXLBackbone, Shaw, Vaswani, AlRfou, LSTM, QRNN
_KINDS: dict[str, tuple[type[nn.Module], type[TransformerXL]]] = {
    name: (backbone, TransformerXL) for name, backbone in zip(KINDS, _BACKBONES, strict=True)
}
"""The backbone and the model that a kind builds."""


def register(
    kind: str, *, backbone: type[nn.Module] = TransformerXLBackbone, model: type[TransformerXL] = TransformerXL
) -> None:
    """Make `kind` a value of `model.kind` that builds these classes; docs/extend.md has examples.

    Recipes, `fit`, checkpoints and `load_model` then know the kind. Checkpoints store its name and no code, so a
    program that loads one has to register the same classes before; `txl` runs the file that TXL_IMPORT names. A kind
    has the settings of the packaged kind whose backbone `backbone` inherits from, otherwise of transformer-xl.

    Args:
        kind: its name, of lower-case letters, digits and dashes. A name that is registered again gets the new classes.
        backbone: maps vectors to vectors, with the arguments and methods of `TransformerXLBackbone`.
        model: a subclass that changes `read`, `training_nll` or its modules. Do not override `forward`, `predict`,
            `hidden` or `log_probs`: training, evaluation and generation call different ones.

    Raises:
        Mistake: a packaged kind has the name, or it has other characters.
    """
    if kind in KINDS or not re.fullmatch(r"[a-z0-9][a-z0-9-]*", kind):
        raise Mistake(
            f"kind must be a new name of lower-case letters, digits and dashes, got {kind!r}. These are taken: "
            f"{', '.join(KINDS)}."
        )
    bases = [name for name in KINDS if issubclass(backbone, _KINDS[name][0])]
    own_kinds[kind] = bases[-1] if bases else "transformer-xl"
    _KINDS[kind] = backbone, model


def build_model(config: TransformerXLConfig, *, backend: str = "auto", recompute: bool = False) -> TransformerXL:
    """The model that `config.kind` names, with weights as at the start of training."""
    backbone, model = _KINDS[config.kind]
    return model(config, backend=backend, recompute=recompute, backbone=backbone)


class Undrawn(TorchFunctionMode):
    """Inside, a model is built without drawing its parameters: others will replace them, or only shapes are asked for.

    To draw on the device "meta" would also import torch._dynamo, which takes as long as torch itself.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        tensor = named.get("tensor") if getattr(func, "__module__", None) == "torch.nn.init" else None
        return tensor if isinstance(tensor, nn.Parameter) else func(*args, **named)


def _without_numbers(config: TransformerXLConfig) -> TransformerXL:
    """The model on the device "meta". A class of your own may draw: the caller's random state is kept."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"), Undrawn():
        return build_model(config)


def count_parameters(config: TransformerXLConfig) -> int:
    """The exact number of parameters, tied ones once. Nothing is allocated."""
    return sum(parameter.numel() for parameter in _without_numbers(config).parameters())


def check_rebuilt(model: TransformerXL) -> None:
    """Raise a `Mistake` if `model` has other classes or names of weights than `build_model` builds from its config.

    A checkpoint stores weights and config. Such a model would be loaded as another one.
    """
    for own, plain in zip((type(model.backbone), type(model)), _KINDS[model.config.kind], strict=True):
        if own is not plain:
            raise Mistake(
                f"The model must have a {plain.__name__}, as its config says (kind = {model.config.kind}), got "
                f"{own.__name__}. A checkpoint stores weights and config, so it would be loaded as another model. "
                'Register the class and set its kind: register("mine", backbone=...), docs/extend.md. Of a wrapper '
                "give the model inside: model.compile() compiles without one."
            )
    wanted = _without_numbers(model.config).state_dict().keys()
    if other := sorted(model.state_dict().keys() ^ wanted, key=lambda name: (name in wanted, name)):
        raise Mistake(
            f"The model must have the names of weights that its config builds, but {other[0]} differs, so a checkpoint "
            "could not be loaded. Compile a part with part.compile(), because torch.compile(part) renames its weights; "
            "remove parametrisations; register a class that adds modules of your own (docs/extend.md)."
        )
