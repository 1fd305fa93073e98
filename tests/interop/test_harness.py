"""`txl harness`: a document is scored once with memory, as `txl eval` scores it; tasks that do not fit are refused.

The tests of the command, and of the class for the harness, need lm_eval; the others do not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import small_model

from transformer_xl.commands.main import main
from transformer_xl.config.settings import CorpusConfig, Lengths, RunConfig, TrainConfig
from transformer_xl.data.vocab import Vocab
from transformer_xl.evaluation.generate import Sampling, generate
from transformer_xl.interop import harness
from transformer_xl.interop.harness import TextModel
from transformer_xl.mistake import Mistake
from transformer_xl.run import LoadedModel, save_checkpoint

CHARS = Vocab("char", ("\n", *"abc ", "<unk>"))
LETTERS = Vocab("char", tuple("\nabc "))
NO_NEWLINE = Vocab("char", tuple("abc"), "drop")
WORDS = Vocab("word", ("<eos>", "<unk>", "the", "ant", "bee", "sleeps", "too"))


def loaded_model(vocab: Vocab, **shape: Any) -> LoadedModel:
    model = small_model(vocab_size=len(vocab), **shape)
    config = RunConfig(
        corpus=CorpusConfig(unit=vocab.unit), model=model.config, train=TrainConfig(tgt_len=5, mem_len=6)
    )
    return LoadedModel(model, vocab, config)


@pytest.fixture
def run(tmp_path, monkeypatch) -> str:
    """A checkpoint of a random model of words in fp32."""
    monkeypatch.setenv("TXL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    loaded = loaded_model(WORDS, dtype=torch.float32)
    save_checkpoint(tmp_path / "run", model=loaded.model, vocab=loaded.vocab, config=loaded.config)
    return str(tmp_path / "run")


@pytest.mark.parametrize("vocab", [CHARS, NO_NEWLINE], ids=["with line ends", "without"])
@pytest.mark.parametrize("mem_len", [6, 0])
def test_a_text_costs_what_its_parts_cost(vocab, mem_len):
    model = TextModel(loaded_model(vocab), Lengths(tgt_len=5, mem_len=mem_len))
    texts = ["a", "abcabc", "abbacbacbabcbacbbac", "ccba" * 9]
    for text, whole in zip(texts, model.log_probs(texts), strict=True):
        cuts = [0, len(text) // 3, len(text) - 1, len(text)]
        pairs = [(model.encode(text[:cut]).tolist(), model.encode(text[cut:]).tolist()) for cut in cuts]
        for cut, score in zip(cuts, model.continuations(pairs), strict=True):
            before = model.log_probs([text[:cut]])[0]
            assert before + score.log_prob == pytest.approx(whole, rel=1e-9), cut
    assert model.log_probs(["", "a"]) == [0.0, model.log_probs(["a"])[0]]


def test_a_line_end_at_the_start_is_the_opening_one():
    model = TextModel(loaded_model(CHARS))
    assert model.log_probs(["\nabc"]) == model.log_probs(["abc"])
    assert model.log_probs(["\n\nabc"])[0] < model.log_probs(["abc"])[0]


def test_a_continuation_is_greedy_if_the_model_would_write_it():
    loaded = loaded_model(LETTERS)
    lengths = Lengths(tgt_len=5, mem_len=6, attn_len=7)  # results do not depend on where a text is cut
    model = TextModel(loaded, lengths)
    prompts = ["\nab", "\nccabcbabccbabc", "\n"]
    written = generate(loaded.model, LETTERS, prompts, lengths, Sampling(temperature=0), 7)
    encoded = [(model.encode(prompt), model.encode(text)) for prompt, text in zip(prompts, written, strict=True)]
    pairs = [(first.tolist(), rest.tolist()) for first, rest in encoded]
    assert all(score.greedy for score in model.continuations(pairs))
    wrong = [(first.tolist(), np.where(np.arange(7) == 5, (rest + 1) % 5, rest).tolist()) for first, rest in encoded]
    assert not any(score.greedy for score in model.continuations(wrong))


def test_unknown_words_are_refused_unless_the_text_spells_them():
    words = Vocab("word", ("<eos>", "<unk>", "a", "bee"))
    model = TextModel(loaded_model(words))
    assert model.encode("a <unk> bee\n").tolist() == [2, 1, 3, 0]
    with pytest.raises(Mistake, match="only words that the model knows, and 2 of 4 in one text are others"):
        model.log_probs(["a bee", "a wasp <unk> hornet"])
    with pytest.raises(Mistake, match="only chars that the model knows, and 1 of 3 in one text are others"):
        TextModel(loaded_model(CHARS)).encode("abz")


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence with which a command line is refused."""
    capsys.readouterr()
    assert main(arguments) == 2
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if line.startswith("txl: ")]
    assert shown.out == "" and len(lines) == 1 and "Traceback" not in shown.err, shown.err
    return lines[0]


def test_the_command_says_what_to_install(run, monkeypatch, capsys):
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    assert "pip install lm-eval" in refused(["harness", run, "--tasks", "any"], capsys)


ROLLING = {
    **{"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
    "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
}


def add_task(folder: Path, name: str, documents: list[dict[str, Any]], settings: dict[str, Any]) -> Path:
    """A task of the user, as JSON, which is YAML; returns the file of its documents."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in documents))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
    (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **data, **settings}))
    return file


def results_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


needs_harness = pytest.mark.filterwarnings("default")
"""Warnings of other packages are not ours to mend."""
DOCUMENTS = ["\nthe ant sleeps\nthe bee sleeps\n<unk> sleeps too\n", "\nthe bee too\n"]


@needs_harness
def test_the_harness_gives_the_perplexity_of_txl_eval(run, tmp_path, capsys):
    pytest.importorskip("lm_eval", reason="needs pip install lm-eval")
    file = add_task(tmp_path / "more", "insects", [{"text": text} for text in DOCUMENTS], ROLLING)
    line = ["harness", run, "--tasks", "insects", "--include", str(tmp_path / "more")]
    found = results_of(line, capsys)["insects"]
    own = results_of(["eval", run, "--data", str(file), "--precision", "fp32"], capsys)["results"][0]
    sizes = sum(len(text.encode()) for text in DOCUMENTS)
    assert found["byte_perplexity,none"] == pytest.approx(np.exp(own["nats"] / sizes), rel=1e-6)
    assert main(line) == 0 and "byte_perplexity" in capsys.readouterr().out


@needs_harness
def test_tasks_with_questions(run, tmp_path, capsys):
    pytest.importorskip("lm_eval", reason="needs pip install lm-eval")
    documents = [{"question": "the ant", "answer": "sleeps"}, {"question": "the bee", "answer": "too"}]
    choices = {"doc_to_text": "{{question}}", "doc_to_choice": ["sleeps", "too"], "doc_to_target": "{{answer}}"}
    add_task(tmp_path / "more", "choose", documents, {"output_type": "multiple_choice", **choices})
    line = ["harness", run, "--tasks", "choose", "--include", str(tmp_path / "more")]
    found = results_of(line, capsys)

    model = TextModel(loaded_model(WORDS, dtype=torch.float32))
    encoded = [
        [model.encode(text).tolist() for text in (document["question"], "sleeps", "too")] for document in documents
    ]
    scores = model.continuations([(question, choice) for question, *two in encoded for choice in two])
    best = [scores[0].log_prob > scores[1].log_prob, scores[2].log_prob < scores[3].log_prob]
    assert found["choose"]["acc,none"] == np.mean(best)


@needs_harness
def test_tasks_that_do_not_fit_are_refused_in_a_sentence(run, tmp_path, capsys):
    pytest.importorskip("lm_eval", reason="needs pip install lm-eval")
    add_task(tmp_path / "more", "wasps", [{"text": "the wasp"}], ROLLING)
    line = ["harness", run, "--include", str(tmp_path / "more"), "--tasks"]
    for more, sentence in (
        (["wasps"], "1 of 2 in one text are others"),
        (["wesps"], "must name tasks that `lm_eval ls tasks` lists, got wesps"),
        (["wasps", "--limit", "0"], "--limit must be at least 1, got 0"),
        (["wasps", "--include", "nowhere"], "There is no folder nowhere"),
    ):
        assert sentence in refused([*line, *more], capsys)
    assert "--tasks must name at least one task" in refused(line[:2], capsys)
