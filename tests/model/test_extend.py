"""Own classes by `register`: each example of docs/extend.md is trained, saved, loaded, scored and continued."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from transformer_xl import (
    LanguageModel,
    TransformerXL,
    TransformerXLBackbone,
    TransformerXLConfig,
    build_model,
    fit,
    load_model,
    load_recipe,
    open_corpus,
    register,
    resolve_settings,
    save_checkpoint,
)
from transformer_xl.commands.main import main
from transformer_xl.config.settings import Lengths, RunConfig
from transformer_xl.config.shape import KINDS, own_kinds
from transformer_xl.data.vocab import Vocab
from transformer_xl.mistake import Mistake
from transformer_xl.model import baselines

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
EXAMPLES = "\n\n".join(block for block in BLOCKS if "register(" in block or "import Memory" in block)
OWN = ["log-distances", "distance-bias", "averaging", "gated", "smoothed"]
SIZES = """
--model.n-layer 2 --model.d-model 16 --model.d-inner 32 --model.n-head 2 --model.d-head 8 --model.init-std 0.3
--model.zero-memory true --train.tgt-len 8 --train.mem-len 16 --train.batch-size 2 --train.max-steps 6
--train.log-every 3 --eval.batch-size 2
"""


@pytest.fixture(autouse=True)
def kinds(monkeypatch, tmp_path):
    """Only the packaged kinds are known, before and after each test; the current folder has a text and `mine.py`."""
    monkeypatch.setattr(baselines, "_KINDS", {name: baselines._KINDS[name] for name in KINDS})
    before = dict(own_kinds)
    own_kinds.clear()
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a text of a few words, again and again\n" * 200)
    Path("mine.py").write_text(EXAMPLES)
    yield
    own_kinds.clear()
    own_kinds.update(before)


def settings(kind: str, *more: str):
    config = load_recipe("text-small", [*SIZES.split(), "--model.kind", kind, *more], data="text.txt")
    corpus = open_corpus(config.corpus)
    return resolve_settings(config, corpus), corpus


@pytest.mark.parametrize("kind", OWN)
def test_an_example_is_loaded_as_it_was_trained(kind):
    exec(EXAMPLES, {"__name__": "mine"})
    config, corpus = settings(kind)
    torch.manual_seed(1)
    model = build_model(config.model)
    assert fit(model, corpus, config, "run")
    trained = LanguageModel(model.eval(), corpus.vocab, config)
    loaded = load_model("run")
    assert type(loaded.model) is type(model) and type(loaded.model.backbone) is type(model.backbone)
    text = "again, a few words of a text"
    np.testing.assert_array_equal(loaded.score(text).nats, trained.score(text).nats)
    assert loaded.generate("a text", max_tokens=12, temperature=0) == trained.generate(
        "a text", max_tokens=12, temperature=0
    )
    # an own part is at work: the plain model with these weights gives other numbers, or has other weights
    plain = build_model(replace(config.model, kind="transformer-xl"))
    if kind == "smoothed":
        ids, call = torch.zeros(1, 1, dtype=torch.long), config.train.lengths
        prediction, _ = model.predict(ids, ids, None, call)
        assert not torch.equal(model.training_nll(prediction, ids, 0.0), prediction.nll)
    elif kind == "gated":
        assert {n for n, _ in model.named_parameters()} > {n for n, _ in plain.named_parameters()}
    elif kind == "distance-bias":
        assert model.backbone.distance_bias.shape == (2, 2, 64) and "distance_bias" not in dict(
            plain.named_parameters()
        )
    else:
        plain.load_state_dict(model.state_dict())
        long = text * 3
        other = LanguageModel(plain.eval(), corpus.vocab, config).score(long).nats
        assert np.abs(other - trained.score(long).nats).max() > 1e-4


def test_txl_knows_a_kind_by_the_file_that_the_user_names(monkeypatch, capsys):
    kind = "averaging"
    words = ["train", "text-small", "--data", "text.txt", *SIZES.split(), "--model.kind", kind, "--out", "run"]
    assert main(words) == 2 and f"got {kind}. If it is a kind of your own" in capsys.readouterr().err
    monkeypatch.setenv("TXL_IMPORT", "mine.py")
    assert main(words) == 0
    trained = capsys.readouterr().out
    assert main(["eval", "run"]) == 0
    [figures] = re.findall(r"  \d\.\d{4}  \d\.\d{4}  +\d+  ", capsys.readouterr().out)  # bpc, loss and targets
    assert figures in trained
    assert main(["train", "--resume", "--out", "run", "--train.max-steps", "8"]) == 0
    monkeypatch.delenv("TXL_IMPORT")
    own_kinds.clear()
    for command in (["eval", "run"], ["generate", "run"], ["train", "--resume", "--out", "run"]):
        assert main(command) == 2
        assert "TXL_IMPORT names the Python file" in capsys.readouterr().err


class Other(TransformerXLBackbone):
    pass


class Mine(TransformerXL):
    pass


def test_a_backbone_draws_each_of_its_weights_itself():
    class Own(TransformerXLBackbone):
        def add_weights(self, config):
            self.projections = torch.nn.Parameter(torch.empty(3))

        def init_weight(self, name, weight):
            torch.nn.init.ones_(weight)

    model = TransformerXL(TransformerXLConfig(vocab_size=9, n_layer=1, d_model=8, n_head=2, d_head=4), backbone=Own)
    assert all(bool((weight == 1).all()) for weight in model.backbone.parameters())


def test_a_model_that_would_be_loaded_as_another_is_refused(tmp_path):
    config, corpus = settings("transformer-xl")
    changed = build_model(config.model)
    changed.backbone = Other(changed.config)
    for model in (changed, Mine(config.model)):
        with pytest.raises(Mistake, match="would be loaded as another model"):
            fit(model, corpus, config, "run")
        with pytest.raises(Mistake, match="would be loaded as another model"):
            save_checkpoint("saved", model=model, vocab=corpus.vocab, config=config)
    assert not Path("run").exists() and not Path("saved").exists()


@pytest.mark.parametrize("part", ["model", "layer", "parametrised"])
def test_a_model_whose_weights_have_other_names_is_refused(tmp_path, monkeypatch, part):
    """A checkpoint of it would be written, and could not be loaded."""
    monkeypatch.chdir(tmp_path)
    config, corpus = settings("transformer-xl")
    model = build_model(config.model)
    layers = model.backbone.layers
    if part == "layer":
        layers[0] = torch.compile(layers[0], backend="eager")
    elif part == "parametrised":
        nn.utils.parametrizations.weight_norm(layers[0].attention.output)
    else:
        model = torch.compile(model, backend="eager")
    for act in (
        lambda: fit(model, corpus, config, "run"),
        lambda: save_checkpoint("saved", model=model, vocab=corpus.vocab, config=config),
    ):
        with pytest.raises(Mistake, match=r"compile\(\)"):
            act()
    assert not Path("run").exists() and not Path("saved").exists()


def test_saving_and_counting_draw_no_random_numbers():
    """Or the class of a kind would change the losses of every step after a checkpoint."""

    class Noisy(TransformerXLBackbone):
        def add_weights(self, config):
            self.register_buffer("noise", torch.randn(3, device="cpu"))

    register("noisy", backbone=Noisy)
    model = build_model(replace(settings("transformer-xl")[0].model, kind="noisy"))
    before = torch.get_rng_state()
    baselines.check_rebuilt(model)
    baselines.count_parameters(model.config)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_cannot_be_registered():
    for kind in ("shaw", "My kind"):
        with pytest.raises(Mistake, match="kind must be a new name"):
            register(kind)


def test_a_kind_has_the_settings_of_its_backbone():
    class Own(baselines.Shaw):
        pass

    sizes = {"vocab_size": 9, "n_layer": 1, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 8}
    with pytest.raises(Mistake, match="kind must be one of"):
        TransformerXLConfig(kind="own-shaw", **sizes)
    register("own-shaw", backbone=Own)
    with pytest.raises(Mistake, match="positions must be at least 1"):
        TransformerXLConfig(kind="own-shaw", **sizes)
    config = TransformerXLConfig(kind="own-shaw", positions=4, **sizes)
    assert type(build_model(config).backbone) is Own
    for other in ("vaswani", "own-shaw"):
        places = {"positions": 4} if other == "own-shaw" else {}
        with pytest.raises(Mistake, match=r"has another backbone. Build the model with build_model\(config\)"):
            TransformerXL(TransformerXLConfig(kind=other, **places, **sizes))


class Slopes(TransformerXLBackbone):
    def __init__(self, config, **options):
        super().__init__(config, **options)
        self.register_buffer("slopes", nn.init.constant_(torch.empty(3), 2.0), persistent=False)


def test_a_loaded_model_has_what_no_file_holds(tmp_path):
    register("slopes", backbone=Slopes)
    shape = TransformerXLConfig(kind="slopes", vocab_size=2, n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=8)
    vocab, config = Vocab("char", ("a", "b")), RunConfig(model=shape)
    save_checkpoint(tmp_path / "saved", model=build_model(shape), vocab=vocab, config=config)
    assert load_model(tmp_path / "saved").model.backbone.slopes.tolist() == [2, 2, 2]


class KeepsOutputs(TransformerXLBackbone):
    def forward(self, x, memory, lengths):
        memory = self.empty_memory(len(x), lengths) if memory is None else memory
        outputs, _ = super().forward(x, memory, lengths)
        return outputs, memory.extend(outputs, mem_len=lengths.mem_len)


def test_a_backbone_with_its_own_forward_generates_from_what_that_keeps():
    register("keeps-outputs", backbone=KeepsOutputs)
    config = TransformerXLConfig(
        kind="keeps-outputs", vocab_size=11, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=8
    )
    model, ids = build_model(config).eval(), torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    lengths = Lengths(tgt_len=2, mem_len=4)
    with torch.no_grad():
        plain, cache = model.empty_memory(1, lengths), model.empty_cache(1, lengths)
        for segment in ids.split(2, dim=1):
            one, plain = model.log_probs(segment, plain, lengths)
            two, cache = model.log_probs(segment, cache, lengths)
            torch.testing.assert_close(one, two)
