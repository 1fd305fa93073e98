"""`txl harness`: a document is scored once with memory, as `txl eval` scores it; tasks that do not fit are refused.

The tests of the command, and of the class for the harness, need lm_eval; the others do not.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from small_models import small_model

from transformer_xl import load_model, open_corpus
from transformer_xl.commands.harness import task_manager
from transformer_xl.commands.main import main
from transformer_xl.config.settings import CorpusConfig, Lengths, RunConfig, TrainConfig
from transformer_xl.data.corpus import Corpus
from transformer_xl.data.datasets import store_folder
from transformer_xl.data.loader import StreamLoader
from transformer_xl.data.vocab import Vocab
from transformer_xl.evaluation.generate import Sampling
from transformer_xl.evaluation.score import evaluate
from transformer_xl.interop import harness, harness_tasks
from transformer_xl.interop.harness import TextModel, sampling_of
from transformer_xl.interop.harness_tasks import articles, task_documents, write_task
from transformer_xl.mistake import Mistake
from transformer_xl.run import LoadedModel, save_checkpoint

CHARS = Vocab("char", ("\n", *"abc ", "<unk>"))
LETTERS = Vocab("char", tuple("\nabc "))
NO_NEWLINE = Vocab("char", tuple("abc"), "drop")
LENGTHS = Lengths(tgt_len=5, mem_len=6)

WIKI = """
= Ant =

Ants carry <unk> .

= = Food = =

They eat = anything = .

= Bee ( insect ) =

Bees fly from one flower to another one , and back .
"""
PLAIN = "the ant sleeps\nthe bee sleeps\n<unk> sleeps too\n"
TASKS = {"txl_ptb": PLAIN, "txl_wikitext2": WIKI}


@pytest.fixture(params=TASKS)
def task(request, tmp_path, monkeypatch) -> str:
    """The name of a task whose corpus is prepared."""
    monkeypatch.setenv("TXL_HOME", str(tmp_path))
    prepare(request.param)
    return request.param


def prepare(task: str) -> Corpus:
    name, text = harness_tasks.TASKS[task].corpus, TASKS[task].encode()
    return Corpus.build(store_folder(name, ""), dict.fromkeys(("train", "test"), text), name=name, unit="word")


def loaded_model(vocab: Vocab, name: str = "", **shape: Any) -> LoadedModel:
    model = small_model(vocab_size=len(vocab), **shape)
    config = RunConfig(corpus=CorpusConfig(name=name), model=model.config, train=TrainConfig(tgt_len=5, mem_len=6))
    return LoadedModel(model, vocab, config)


def save_run(folder: Path, task: str) -> Path:
    """A checkpoint of a random model of fp32 that knows the words of a task."""
    corpus = open_corpus(harness_tasks.TASKS[task].corpus)
    loaded = loaded_model(corpus.vocab, corpus.name, dtype=torch.float32)
    save_checkpoint(folder, model=loaded.model, vocab=loaded.vocab, config=loaded.config)
    return folder


def test_articles_are_cut_before_their_titles_and_lose_nothing():
    found = articles(WIKI)
    assert "".join(found) == WIKI
    assert [text[:8] for text in found] == ["\n= Ant =", "\n= Bee ("]
    assert articles("no title\n") == ["no title\n"]


def test_every_token_of_a_corpus_is_scored_once(task):
    corpus = harness_tasks.corpus_of(task)
    documents, ids = list(task_documents(task, corpus)), corpus.split("test").ids
    read = np.concatenate([corpus.vocab.encode(document["text"]) for document in documents])
    opening = int(task == "txl_ptb")  # the line end before its first line is not of the text
    np.testing.assert_array_equal(read[opening:], ids)
    assert sum(document["words"] for document in documents) == len(read) - len(documents)
    assert all(document["text"].startswith("\n") for document in documents)
    first, lines = documents[0], documents[0]["text"].split("\n")
    assert first["bytes"] == sum(len(line.split()) + len(line.replace(" ", "")) + 1 for line in lines) - 2


def test_a_task_is_a_folder_that_needs_nothing_else(task):
    yaml = pytest.importorskip("yaml")
    folder = write_task(task, harness_tasks.corpus_of(task))
    assert write_task(task, harness_tasks.corpus_of(task)) == folder, "it may be written again"

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
    settings = yaml.load((folder / f"{task}.yaml").read_text(), Loader=Loader)
    file = Path(settings["dataset_kwargs"]["data_files"]["test"])
    assert settings["task"] == task and settings["doc_to_target"] == "{{text[1:]}}" and file.is_absolute()
    documents = [json.loads(line) for line in file.read_text().splitlines()]
    module, _, function = settings["process_results"].partition(".")
    names: dict[str, Any] = {}
    exec((folder / f"{module}.py").read_text(), names)
    scores = names[function](documents[0], [-7.0])
    assert scores["word_perplexity"] == (-7.0, documents[0]["words"])
    assert scores["byte_perplexity"] == scores["bits_per_byte"] == (-7.0, documents[0]["bytes"])
    assert {each["metric"] for each in settings["metric_list"]} == scores.keys()


def test_documents_score_as_txl_eval_scores_their_file(task):
    corpus = harness_tasks.corpus_of(task)
    file = write_task(task, corpus) / f"{task}.jsonl"
    documents, loaded = list(task_documents(task, corpus)), loaded_model(corpus.vocab)
    log_probs = TextModel(loaded).log_probs([document["text"] for document in documents])
    split = open_corpus(CorpusConfig(name=str(file), unit="word"), corpus.vocab, whole=True).split("all")
    assert split.documents is not None and len(split.documents) == len(documents)
    loader = StreamLoader(split, batch_size=1, tgt_len=5)
    result = evaluate(loaded.model, loader, LENGTHS, unit="word", token_sizes=corpus.vocab.token_sizes())
    assert -sum(log_probs) == pytest.approx(result.nats, rel=1e-9)
    assert sum(document["words"] for document in documents) == result.targets
    assert sum(document["bytes"] for document in documents) == result.bytes


@pytest.mark.parametrize("vocab", [CHARS, NO_NEWLINE], ids=["with line ends", "without"])
@pytest.mark.parametrize("mem_len", [6, 0])
def test_a_text_costs_what_its_parts_cost(vocab, mem_len):
    model = TextModel(loaded_model(vocab), Lengths(tgt_len=5, mem_len=mem_len), batch_tokens=20)
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
    window = Lengths(tgt_len=5, mem_len=6, attn_len=7)  # results do not depend on where a text is cut
    model = TextModel(loaded_model(LETTERS), window)
    prompts = ["ab", "ccabcbabccbabc", ""]
    written = model.write([(prompt, {"max_gen_toks": 7, "until": []}) for prompt in prompts])
    assert [len(text) for text in written] == [7, 7, 7]
    encoded = [(model.encode(prompt), model.encode(text)) for prompt, text in zip(prompts, written, strict=True)]
    pairs = [(first.tolist(), rest.tolist()) for first, rest in encoded]
    assert all(score.greedy for score in model.continuations(pairs))
    wrong = [(first.tolist(), np.where(np.arange(7) == 5, (rest + 1) % 5, rest).tolist()) for first, rest in encoded]
    assert not any(score.greedy for score in model.continuations(wrong))


def test_written_texts_keep_their_order_and_stop_strings():
    model = TextModel(loaded_model(LETTERS))
    requests = [("abc" * n, {"max_gen_toks": 12, "until": [stop]}) for n in (3, 1, 2) for stop in ("a", "b")]
    together = model.write(requests)
    assert together == [model.write([request])[0] for request in requests]
    assert all(how["until"][0] not in text for text, (_, how) in zip(together, requests, strict=True))


def test_the_settings_of_a_task_become_a_sampling():
    assert sampling_of({"until": "\n", "temperature": 0.7}) == Sampling(temperature=0, stop=("\n",))
    drawn = sampling_of({"until": ["a", ""], "do_sample": True, "temperature": 0.7, "top_p": 0.9})
    assert drawn == Sampling(temperature=0.7, top_k=0, top_p=0.9, stop=("a",), seed=drawn.seed)
    assert drawn.seed is not None, "another run must give the same texts"


def test_unknown_words_are_refused_unless_the_text_spells_them():
    words = Vocab("word", ("<eos>", "<unk>", "a", "bee"))
    model = TextModel(loaded_model(words))
    assert model.encode("a <unk> bee\n").tolist() == [2, 1, 3, 0]
    with pytest.raises(Mistake, match="2 of 4 in one text are others, such as 'wasp'"):
        model.log_probs(["a bee", "a wasp <unk> hornet"])
    with pytest.raises(Mistake, match="1 of 3 in one text are others, such as 'z'"):
        TextModel(loaded_model(CHARS)).write([("abz", {})])


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence with which a command line is refused."""
    capsys.readouterr()
    assert main(arguments) == 2
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if line.startswith("txl: ")]
    assert shown.out == "" and len(lines) == 1 and "Traceback" not in shown.err, shown.err
    return lines[0]


def test_the_command_says_what_to_install(task, tmp_path, monkeypatch, capsys):
    run = save_run(tmp_path / "run", task)
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    assert "pip install lm-eval" in refused(["harness", str(run), "--tasks", task], capsys)


class Installed(NamedTuple):
    """A run on the corpus of a task, and a folder for more tasks."""

    task: str
    run: str
    more: Path


@pytest.fixture
def installed(task, tmp_path, monkeypatch) -> Installed:
    pytest.importorskip("lm_eval", reason="needs pip install lm-eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    more = tmp_path / "more"
    more.mkdir()
    return Installed(task, str(save_run(tmp_path / "run", task)), more)


def add_task(folder: Path, name: str, documents: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """A task of the user, as JSON, which is YAML."""
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in documents))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
    (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **data, **settings}))


def results_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


needs_harness = pytest.mark.filterwarnings("default")
"""Warnings of other packages are not ours to mend."""


@needs_harness
def test_the_harness_gives_the_perplexity_of_txl_eval(installed, tmp_path, capsys):
    task, run, _ = installed
    found = results_of(["harness", run, "--tasks", task, "--output", str(tmp_path / "all.json")], capsys)
    figures = {each["metric"]: each["value"] for each in found["results"]}
    file = tmp_path / "harness" / task / f"{task}.jsonl"
    own = results_of(["eval", run, "--data", str(file), "--precision", "fp32"], capsys)["results"][0]
    assert figures["word_perplexity"] == pytest.approx(own["ppl"], rel=1e-6)
    assert figures["bits_per_byte"] == pytest.approx(own["bits_per_byte"], rel=1e-6)
    assert figures["byte_perplexity"] == pytest.approx(2 ** own["bits_per_byte"], rel=1e-6)
    assert json.loads((tmp_path / "all.json").read_text())["n-samples"][task]["effective"] == len(articles(TASKS[task]))
    assert main(["harness", run, "--tasks", task, "--limit", "1"]) == 0
    assert "only the first 1 documents of each task" in capsys.readouterr().out


@needs_harness
def test_the_harness_gives_the_same_perplexity_over_http(installed, capsys):
    """`local-completions`, the harness's own class for a server: it reads ids, and puts a line end before each text."""
    pytest.importorskip("tenacity", reason="needs pip install 'lm-eval[api]'")
    pytest.importorskip("fastapi", reason="needs the extra serve")
    from serving_live import live_server

    task, run, _ = installed
    own = {row["metric"]: row["value"] for row in results_of(["harness", run, "--tasks", task], capsys)["results"]}
    manager = task_manager([task], None)
    with live_server(load_model(run)) as live:
        where = {"base_url": f"{live.url}/v1/completions", "model": live.service.name, "max_length": 10_000}
        how = {"model": "local-completions", "model_args": where, "task_manager": manager, "log_samples": False}
        found = import_module("lm_eval").simple_evaluate(tasks=[task], **how)["results"][task]
    for metric, value in own.items():
        assert found[f"{metric},none"] == pytest.approx(value, rel=1e-6), metric  # fp32, summed in fp64


@needs_harness
@pytest.mark.parametrize("task", ["txl_ptb"], indirect=True)
def test_tasks_with_questions(installed, capsys):
    documents = [{"question": "the ant", "answer": "sleeps"}, {"question": "the bee", "answer": "too"}]
    choices = {"doc_to_text": "{{question}}", "doc_to_choice": ["sleeps", "too"], "doc_to_target": "{{answer}}"}
    add_task(installed.more, "choose", documents, {"output_type": "multiple_choice", **choices})
    answers = {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 3}, "metric_list": [{"metric": "exact_match"}]}
    texts = {"doc_to_text": "{{question}}", "doc_to_target": "{{answer}}"}
    add_task(installed.more, "answer", documents, {"output_type": "generate_until", **texts, **answers})
    line = ["harness", installed.run, "--tasks", "choose,answer", "--include", str(installed.more)]
    found = {(each["task"], each["metric"]): each["value"] for each in results_of(line, capsys)["results"]}

    corpus = harness_tasks.corpus_of("txl_ptb")
    model = TextModel(loaded_model(corpus.vocab, dtype=torch.float32))
    encoded = [
        [model.encode(text).tolist() for text in (document["question"], "sleeps", "too")] for document in documents
    ]
    scores = model.continuations([(question, choice) for question, *two in encoded for choice in two])
    best = [scores[0].log_prob > scores[1].log_prob, scores[2].log_prob < scores[3].log_prob]
    assert found["choose", "acc"] == np.mean(best)
    written = model.write([(document["question"], answers["generation_kwargs"]) for document in documents])
    exact = [text.strip() == document["answer"] for text, document in zip(written, documents, strict=True)]
    assert ("answer", "exact_match") in found and found["answer", "exact_match"] == np.mean(exact)


@needs_harness
@pytest.mark.parametrize("task", ["txl_ptb"], indirect=True)
def test_tasks_that_do_not_fit_are_refused_in_a_sentence(installed, capsys):
    line = ["harness", installed.run, "--include", str(installed.more), "--tasks"]
    add_task(
        installed.more,
        "wasps",
        [{"text": "the wasp"}],
        {"output_type": "loglikelihood_rolling"}
        | {"doc_to_text": "", "doc_to_target": "{{text}}", "metric_list": [{"metric": "word_perplexity"}]},
    )
    assert "such as 'wasp'" in refused([*line, "wasps"], capsys)
    assert "got 'wesps'. Did you mean wasps?" in refused([*line, "wesps"], capsys)
    assert "run `txl data wikitext-2`" in refused([*line, "txl_wikitext2"], capsys)
    prepare("txl_wikitext2")
    assert "is not that of the corpus wikitext-2" in refused([*line, "txl_ptb,txl_wikitext2"], capsys)
    assert "--tasks must name at least one task" in refused(line[:-1], capsys)
    assert "--limit must be at least 1, got 0" in refused([*line, "txl_ptb", "--limit", "0"], capsys)
    assert "There is no folder nowhere" in refused([*line[:2], "--include", "nowhere", "--tasks", "wasps"], capsys)
