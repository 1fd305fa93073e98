"""The model of Al-Rfou et al. 2019 (arXiv 1808.04444) with its auxiliary losses, for Tables 2 and 3.

It is a kind of its own, registered by this file: TXL_IMPORT names it where `txl` trains or reads such a model. The
packaged kind "al-rfou" is the row of Table 6, which has none of these losses.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl import TransformerXL, TransformerXLConfig, register
from transformer_xl.model.baselines.positions import AlRfou
from transformer_xl.model.transformer_xl import Prediction


class Auxiliary(TransformerXL):
    """A language model whose every layer predicts the next token and the one after it, by classifiers of its own.

    Layer l of n predicts until l / 2n of training; the last one to the end. The token after the next has half the
    weight (Al-Rfou et al. 2019, "Auxiliary Losses"). Both tokens must be targets of the segment. With
    classifiers for 256 byte values the 12 layers of Table 2 have 44.1M parameters and the 64 layers 235.1M.
    """

    def __init__(self, config: TransformerXLConfig, **options: Any):
        super().__init__(config, **options)
        classifiers = 2 * config.n_layer - 1  # the softmax is the last layer's first one
        self.classifiers: nn.ModuleList = nn.ModuleList(
            nn.Linear(config.d_model, config.vocab_size) for _ in range(classifiers)
        )
        self.init_weights()

    def training_nll(
        self, prediction: Prediction, targets: Int[Tensor, "B T"], progress: float
    ) -> Float[Tensor, "B T"]:
        """Nats of each target, plus those of the auxiliary predictions."""
        later = F.pad(targets[:, 1:], (0, 1), value=-1).where(targets >= 0, -1)
        total = prediction.nll + 0.5 * _nll(self.classifiers[-1](prediction.features), later)
        for number, x in enumerate(prediction.outputs[:-1], start=1):
            if progress < number / (2 * self.config.n_layer):
                first, second = self.classifiers[2 * number - 2 : 2 * number]
                x = self.dropout(x)
                total = total + _nll(first(x), targets) + 0.5 * _nll(second(x), later)
        return total


def _nll(logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Nats of each target; 0 where it is -1."""
    return F.cross_entropy(logits.transpose(1, 2).float(), targets, ignore_index=-1, reduction="none")


register("al-rfou-auxiliary", backbone=AlRfou, model=Auxiliary)
