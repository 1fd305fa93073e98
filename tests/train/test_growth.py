"""`--init RUN --corpus.extend-vocab`: new words for an old model."""

from __future__ import annotations

from shlex import split as words
from typing import Any

import pytest
import torch
from small_models import small_model
from tiny_runs import REST, TINY, TRAIN, refused

from transformer_xl.commands.main import main
from transformer_xl.config.settings import Lengths
from transformer_xl.data.vocab import Vocab
from transformer_xl.run.checkpoint import load_model
from transformer_xl.run.folder import Run
from transformer_xl.run.parts import weights
from transformer_xl.train.growth import grown

OLD = "the cat sat on the mat\nthe dog <unk> on the mat\n" * 40
NEW = "the cat ran under a table\na dog sat\n" * 40
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "not tied": {"tie_weight": False},
    "bands": {"cutoffs": (5, 11), "div_val": 2, "d_embed": 12},
    "bands of one width": {"cutoffs": (5, 11)},
    "n-grams and matches": {"ngrams": (2,), "ngram_rows": 37, "ngram_width": 6, "matches": (1, 2)},
    "lstm": {"kind": "lstm"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_known_tokens_are_predicted_as_before(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the noise: `<unk>` and the new words share what `<unk>` had."""
    monkeypatch.setattr("transformer_xl.train.growth.NOISE", 0.0)
    vocab = Vocab("word", ("<eos>", *map(str, range(17)), "<unk>"))
    old = small_model(vocab_size=len(vocab), **KINDS[kind])
    new = small_model(vocab_size=len(vocab) + 4, **KINDS[kind])
    torch.nn.init.normal_(old.softmax.bias)
    found = grown(new, weights(old), vocab)
    assert {name: value.shape for name, value in found.items()} == {k: v.shape for k, v in weights(new).items()}
    with torch.no_grad():
        for name, value in weights(new).items():
            value.copy_(found[name])
    ids, lengths = torch.tensor([[3, 17, 1, 3, 17, 4, 0, 18]]), Lengths(tgt_len=8, mem_len=4)
    with torch.no_grad():
        before, after = (model.log_probs(ids, None, lengths)[0].exp() for model in (old, new))
    torch.testing.assert_close(after[..., :18], before[..., :18])
    torch.testing.assert_close(after[..., 18:], before[..., 18:].expand(-1, -1, 5) / 5)
    x, y = (model.embedding(torch.tensor([[18, size - 1]])) for model, size in ((old, 19), (new, 23)))
    torch.testing.assert_close(x, y)
    early = Vocab("word", ("<eos>", "<unk>", *map(str, range(17))))  # in another band it shares nothing
    if "cutoffs" in KINDS[kind]:
        assert torch.equal(grown(new, weights(old), early)["softmax.bias"][:11], old.softmax.bias[:11])
    if kind == "plain":
        table, chars = old.embedding.tables[0].detach(), Vocab("char", tuple(map(chr, range(97, 116))))
        mean = grown(new, weights(old), chars)["embedding.tables.0"][19:]
        torch.testing.assert_close(mean, table.mean(0).expand(4, -1))
        monkeypatch.undo()
        noise = (grown(new, weights(old), vocab)["embedding.tables.0"][19:] - table[18]) / table.std()
        assert 0.06 < noise.std() < 0.14


def test_new_words_for_a_run(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "old.txt").write_text(OLD)
    (tmp_path / "new.txt").write_text(NEW)
    old, new = tmp_path / "old", tmp_path / "new"
    first = f"train text-small --data {tmp_path}/old.txt --corpus.unit word --no-report --out {old}"
    assert main([*words(first), *TINY]) == 0
    again = f"train --init {old} --data {tmp_path}/new.txt --no-report --out {new}"
    assert "are unknown. Add them with --corpus.extend-vocab" in refused(again, capsys)
    assert main([*words(f"{again} --corpus.extend-vocab"), *TRAIN, *words("--train.max-steps 4 --eval.mem-len 5")]) == 0
    assert "4 new words were added to the vocabulary of 8." in capsys.readouterr().out
    before, after = (load_model(path) for path in (old, new))
    assert after.vocab.symbols[: len(before.vocab)] == before.vocab.symbols
    assert set(after.vocab.symbols[len(before.vocab) :]) == {"ran", "under", "a", "table"}
    assert main(words(f"train --resume --out {new} --train.max-steps 6 --no-report")) == 0
    assert Run(new).settings().model.vocab_size == 12
    folder = tmp_path / "exported"
    assert main(words(f"convert {new} --to {folder} --to-format huggingface")) == 0


def test_a_run_goes_on_with_the_recipe_of_another_kind(tmp_path) -> None:
    """text-words, which is chosen for words, has dropout on attention; an LSTM has none."""
    (tmp_path / "text.txt").write_text(OLD)
    line, lstm = f"train --data {tmp_path}/text.txt --corpus.unit word", "--model.kind lstm --model.n-layer 1"
    assert main([*words(f"{line} {lstm} --model.d-model 8 --out {tmp_path}/first"), *TRAIN, *REST]) == 0
    assert main([*words(f"{line} --init {tmp_path}/first --out {tmp_path}/next"), *TRAIN, *REST]) == 0
