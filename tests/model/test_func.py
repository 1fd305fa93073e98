"""`torch.func` on the loss of a model: gradients of each row, and products with second derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import VARIANTS, lengths, small_model, text
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.functional import pad

from transformer_xl.mistake import Mistake
from transformer_xl.ops import choice, relative_attention

KINDS = {name: VARIANTS[name] for name in ("post-norm", "bands", "projected", "QK-norm", "matches", "gated")}


def loss_of(model: Any) -> Any:
    """The mean nats of a text after another one, as a function of the weights."""

    def loss(weights: dict[str, Tensor], before: Tensor, ids: Tensor) -> Tensor:
        call = lengths(6, tgt_len=7)
        _, memory = functional_call(model, weights, (before[:, :-1], before[:, 1:], None, call))
        targets = pad(ids[:, 2:], (1, 0), value=-100)  # the first is not scored
        nll, _ = functional_call(model, weights, (ids[:, :-1], targets, memory, call))
        return nll.mean()

    return loss


@pytest.mark.filterwarnings("ignore:torch.searchsorted:UserWarning")  # vmap's layout
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_each_row_are_those_of_the_row_alone(kind: str) -> None:
    model = small_model(**KINDS[kind])
    weights, loss = {name: weight.detach() for name, weight in model.named_parameters()}, loss_of(model)
    before, ids = text(3, 8), text(3, 8, seed=1)
    found = vmap(grad(loss), in_dims=(None, 0, 0))(weights, before[:, None], ids[:, None])
    for row in range(3):
        model.zero_grad()
        loss(dict(model.named_parameters()), before[row : row + 1], ids[row : row + 1]).backward()
        for name, weight in model.named_parameters():
            expected = torch.zeros_like(weight) if weight.grad is None else weight.grad
            torch.testing.assert_close(found[name][row], expected, msg=lambda told, name=name: f"{name}: {told}")


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # of PyTorch's own jvp
def test_a_product_with_second_derivatives_is_the_change_of_the_gradient() -> None:
    model = small_model(**VARIANTS["bands"])
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    torch.manual_seed(2)
    direction, ids, call = {name: torch.randn_like(weight) for name, weight in weights.items()}, text(2, 8), lengths(6)
    _, memory = model(ids, ids, None, call)  # of weights that do not move: no derivative reaches a memory

    def loss(moved: dict[str, Tensor]) -> Tensor:
        return functional_call(model, moved, (ids[:, :-1], ids[:, 1:], memory, call))[0].mean()

    gradient = grad(loss)
    _, found = jvp(gradient, (weights,), (direction,))
    ends = [gradient({n: w + step * direction[n] for n, w in weights.items()}) for step in (1e-5, -1e-5)]
    for name, product in found.items():
        expected = (ends[0][name] - ends[1][name]) / 2e-5
        torch.testing.assert_close(product, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # of PyTorch's own derivatives
@pytest.mark.parametrize("kind", KINDS)
def test_forward_mode_has_the_derivative_in_a_direction(kind: str) -> None:
    model = small_model(**KINDS[kind])
    weights, loss = {name: weight.detach() for name, weight in model.named_parameters()}, loss_of(model)
    torch.manual_seed(2)
    before, ids, direction = text(3, 8), text(3, 8, seed=1), {n: torch.randn_like(w) for n, w in weights.items()}
    gradient = grad(loss)(weights, before, ids)
    with forward_ad.dual_level():
        moved = {name: forward_ad.make_dual(weight, direction[name]) for name, weight in weights.items()}
        found = forward_ad.unpack_dual(loss(moved, before, ids)).tangent
    torch.testing.assert_close(found, sum((gradient[name] * direction[name]).sum() for name in weights))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # vmap of PyTorch's fused attention
@pytest.mark.parametrize("backend", ["auto", "strided", "sdpa"])
def test_rows_may_differ_in_their_mask_alone(backend: str) -> None:
    torch.manual_seed(1)
    q, r, bias = torch.randn(2, 2, 4, 3), torch.randn(2, 4, 3), torch.randn(2, 3)
    masks = torch.tensor([[0, 0], [-1, -2]])
    found = vmap(lambda valid: relative_attention(q, q, q, r, bias, bias, valid=valid, backend=backend))(masks)
    torch.testing.assert_close(found, torch.stack([relative_attention(q, q, q, r, bias, bias, valid=m) for m in masks]))


@pytest.mark.parametrize("backend", ["chunked", "native"])
def test_a_backend_without_transforms_names_one_that_has_them(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "native_refusal", lambda *_: None)  # as if it were built
    q, r, bias = torch.randn(2, 2, 4, 3), torch.randn(2, 4, 3), torch.randn(2, 3)
    with pytest.raises(Mistake, match=rf"backend {backend} cannot serve this call: .*torch\.func.*Use auto or strided"):
        vmap(lambda x: relative_attention(x, q, q, r, bias, bias, backend=backend))(q[None])
