"""Help, error messages, titles and documentation are true, and a user can follow them."""

from __future__ import annotations

import json
import re
import shutil
from itertools import product
from pathlib import Path
from shlex import split as words

import pytest
import torch
from tiny_runs import TINY, printed, refused

from transformer_xl import TransformerXLConfig, load_model
from transformer_xl.commands.eval import _warn_of_short_streams
from transformer_xl.commands.main import main
from transformer_xl.config.recipe import load_recipe
from transformer_xl.config.settings import Lengths
from transformer_xl.mistake import Mistake
from transformer_xl.model.baselines import build_model
from transformer_xl.run.checkpoint import save_checkpoint
from transformer_xl.runtime.device import resolve_device
from transformer_xl.runtime.ranks import join_ranks


def shown_help(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    return " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())


LAUNCH = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture
def environment(monkeypatch):
    """Sets the variables of a launcher, and of no other."""

    def give(**variables: str) -> None:
        for name in (*LAUNCH, "LOCAL_RANK", "SLURM_NTASKS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return give


@pytest.mark.parametrize("missing", LAUNCH)
@pytest.mark.parametrize("value", [None, "", " "])
def test_an_incomplete_launch_is_one_process(missing, value, environment, capsys):
    given = {name: word for name, word in LAUNCH.items() if name != missing}
    environment(**given, **({} if value is None else {missing: value}))
    if missing in ("MASTER_ADDR", "MASTER_PORT"):
        with pytest.raises(Mistake, match=f"must set {missing}: WORLD_SIZE is 2 and RANK 1"), join_ranks("cpu"):
            pass
        return
    with join_ranks("cpu") as ranks:
        assert (ranks.rank, ranks.size) == (0, 1)
    told = capsys.readouterr().err
    if missing == "WORLD_SIZE":
        assert told == ""
    else:
        assert told == f"WORLD_SIZE is 2 without {missing}: this process trains alone. torchrun sets all of them.\n"


def test_a_task_of_several_without_torchrun_says_that_it_is_alone(environment, capsys):
    environment(SLURM_NTASKS="2")
    with join_ranks("cpu") as ranks:
        assert (ranks.rank, ranks.size) == (0, 1)
    assert capsys.readouterr().err.startswith("SLURM_NTASKS is 2 without RANK, ")


@pytest.mark.parametrize("export", [{"WORLD_SIZE": ""}, {"WORLD_SIZE": "8"}, {"WORLD_SIZE": "many"}, {"RANK": "x"}])
@pytest.mark.parametrize("command", ["eval nowhere", "train nowhere", "train"])
def test_variables_of_a_scheduler_change_no_sentence(export, command, environment, capsys):
    told = []
    for variables in ({}, export):
        environment(**variables)
        try:
            told.append((main(command.split()), capsys.readouterr()))
        except SystemExit as exit:
            told.append((exit.code, capsys.readouterr()))
    assert told[0] == told[1] and told[0][0] == 2


@pytest.mark.parametrize(
    "wrong",
    [{"WORLD_SIZE": "two"}, {"WORLD_SIZE": "-2"}, {"RANK": "2"}, {"RANK": "9" * 5000}, {"MASTER_PORT": "65536"}],
)
def test_a_launch_with_wrong_numbers_is_refused_in_one_sentence(wrong, environment, capsys):
    environment(**LAUNCH | wrong)
    for command in ("eval nowhere", "train nowhere"):
        assert main(command.split()) == 2
        told = capsys.readouterr().err
        assert told.startswith("txl: The variable ") and told.count("\n") == 1 and next(iter(wrong)) in told
    environment(**LAUNCH)
    assert "rank 1: txl eval runs in one process" in refused(["eval", "nowhere"], capsys)


NOWHERE = ["gpu", "meta", "cuda:x", "cuda:-1", "CPU", "", "cpu:0", "cuda:2", "cuda:999999999"]


@pytest.mark.parametrize(("count", "device"), [*product([0, 2], NOWHERE), (0, "cuda"), (0, "cuda:0")])
def test_a_device_that_is_not_here_is_refused_in_our_own_words(device, count, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    here = "auto, cpu, cuda, cuda:0 or cuda:1" if count else "auto or cpu"
    with pytest.raises(ValueError) as error:
        resolve_device(device)
    assert str(error.value) == f"device must be {here}: torch finds no other here, got {device!r}."


@pytest.mark.parametrize(("kind", "positions"), [("transformer-xl", 0), ("shaw", 3), ("vaswani", 0), ("al-rfou", 3)])
def test_a_model_with_an_empty_vocabulary_is_not_built(kind, positions):
    with pytest.raises(ValueError, match="vocab_size must be at least 1 to build a model, got 0"):
        build_model(TransformerXLConfig(vocab_size=0, kind=kind, positions=positions))


@pytest.mark.parametrize("word", ["none", "None", "NONE"])
def test_none_has_one_spelling_everywhere(word, monkeypatch):
    asked = []
    monkeypatch.setattr("transformer_xl.commands.eval.Eval.run", lambda self: asked.append(self))
    assert main(["eval", "run", "--clamp-len", word, "5", "--attn-len", word]) == 0
    assert asked[0].clamp_len == (None, 5) and asked[0].attn_len == (None,)
    assert load_recipe("enwik8-12l", ["--eval.clamp-len", word]).eval.clamp_len is None


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a run of words, its text, and a text with words that it does not know."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
        Path("other.txt").write_text("the slow brown fox jumps over the lazy cat\n" * 40)
        assert main([*words("train text-words --data text.txt --out run --corpus.min-count 2"), *TINY]) == 0
        yield folder


DIVERGING = "eval run --dynamic sgd --dynamic-lr 1e30 --mem-len 0 3"


def test_a_result_that_is_not_finite_is_shown_and_is_a_failure(home, capsys):
    capsys.readouterr()
    assert main(DIVERGING.split()) == 2
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 4 and "nan" in shown.out
    [told] = [line for line in shown.err.splitlines() if "finite" in line]
    assert re.fullmatch(r"txl: 2 of 2 results are not finite: .* Lower --dynamic-lr, which is 1e\+30\.", told)
    assert main([*DIVERGING.split(), "--json"]) == 2
    results = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["results"]
    assert [(result["finite"], result["loss"]) for result in results] == [(False, None)] * 2


def test_a_model_with_weights_that_are_not_finite_is_a_failure(home, tmp_path, capsys):
    broken = load_model("run")
    with torch.no_grad():
        broken.model.softmax.bias[0] = torch.nan
    save_checkpoint(tmp_path / "nan", model=broken.model, vocab=broken.vocab, config=broken.config)
    for command in ("eval {}", "score {} text.txt"):
        assert main(command.format(tmp_path / "nan").split()) == 2
        shown = capsys.readouterr()
        assert "nan" in shown.out and "finite" in shown.err and "dynamic" not in shown.err


def test_lines_are_read_without_a_byte_order_mark(home, capsys):
    Path("marked.txt").write_bytes(b"\xef\xbb\xbf" + Path("text.txt").read_bytes())
    assert printed("score run marked.txt", capsys) == printed("score run text.txt", capsys)


def test_bits_per_byte_with_unknown_words_are_marked_as_not_comparable(home, capsys):
    told = "bits/byte is not comparable with other vocabularies: <unk> hides what it stands for"
    assert told in printed("eval run --data other.txt", capsys).splitlines()[0]
    shown = printed("eval run --data text.txt", capsys)
    assert "bits/byte" in shown and told not in shown
    assert main(words("score run other.txt")) == 0
    assert capsys.readouterr().err.endswith("are unknown to the model, so bits are not comparable with other models.\n")
    assert main(words("score run text.txt")) == 0
    assert capsys.readouterr().err == ""


def test_a_backend_that_is_replaced_is_told(home, monkeypatch, capsys):
    monkeypatch.setenv("TXL_NATIVE", "0")
    line = (
        "train text-words --data text.txt --out replaced --corpus.min-count 2 --train.backend native --train.device cpu"
    )
    assert main([*words(line), *TINY]) == 0
    told = "train.backend is strided: native cannot serve: TXL_NATIVE=0 switches it off; "
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith(told)]
    assert main([*words(line), *TINY, "--resume"]) == 0
    line = (
        "train text-small --data text.txt --out other --train.backend strided --train.device cpu --model.kind vaswani"
    )
    assert main([*words(line), *TINY]) == 0
    told = "train.backend is auto: kind = vaswani has no relative attention.\n"
    streams = capsys.readouterr()
    assert told in streams.err and ", auto; " in streams.out
    assert main([*words(line), *TINY, "--resume"]) == 0


def test_a_chosen_recipe_reads_a_text_as_the_model_of_init_does(home, capsys):
    line = "train text-words --data text.txt --out of-words --corpus.min-count 2 --train.device cpu"
    assert main([*words(line), *TINY]) == 0
    capsys.readouterr()
    assert main([*words("train --init of-words --data text.txt --out more --no-report"), *TINY[-2:]]) == 0
    told = capsys.readouterr().out
    assert "is read as words" in told and "the model and its vocabulary are those of of-words." in told


def test_streams_too_short_for_the_memory_are_told(home, capsys):
    told = "txl: Each of the 10 streams begins without a past, and has 10 tokens, less than twice the 9 "
    for more, said in (
        ("--mem-len 0 9", True),
        ("--mem-len 5", False),
        ("--mem-len 9 --batch-size 1", False),
        ("--mem-len 9 --attn-len 3", False),
    ):
        assert main(words(f"eval run --split train --max-tokens 100 {more}")) == 0
        assert (told in capsys.readouterr().err) == said


def test_matches_look_back_further_than_the_memory(capsys):
    model = TransformerXLConfig(vocab_size=9, matches=(2,), match_window=50)
    for mem_len, tokens, said in ((5, 199, True), (5, 200, False), (0, 199, False)):
        _warn_of_short_streams(tokens, 2, [Lengths(tgt_len=5, mem_len=mem_len)], model)
        assert ("99 tokens, less than twice the 50 that" in capsys.readouterr().err) == said


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("eval run --same-length --mem-len 0", "--same-length needs a memory: --mem-len must be at least 1, got 0."),
        ("train text-words --data text.txt --out x --train.backend triton --train.device cpu", "got triton: "),
        ("train lm1b-small --data text.txt --out x", "model.cutoffs must be below model.vocab_size = "),
        ("train text-small --data one.jsonl --out x", "one.jsonl has nothing for the valid split"),
        (
            "train text-words --data text.txt --out none",
            "none exists. It saved no checkpoint: start it again by txl train --resume auto, or",
        ),
        ("train --resume --out none", "Start again by --resume auto, with RECIPE or --data."),
        ("generate run --top-k -1", "--top-k must be at least 0, got -1"),
        ("generate run --stop=", "--stop must be texts that are not empty"),
        ("score run latin.txt", "latin.txt, line 2, must be UTF-8"),
        ("generate run --max-tokens 2 --prompt the @latin.txt", "The prompt @latin.txt must be UTF-8"),
        ("score run none", "none must be a file, and is a folder, a pipe or a device."),
        (
            "train text-small --data text.txt --out /proc/none/x",
            "/proc/none/x could not be written: No such file or directory. Its folder is missing",
        ),
        ("score run /dev/null", "/dev/null must be a file, and is a folder, a pipe or a device. Save"),
        ("generate run --prompt '@a\rb'", "There is no file a\\rb."),
        ("generate run --prompt @", ". must be a file, and is a folder"),
        (f"generate run --from-test 5 --at {'9' * 5000}", "--at must be a position, from 0, or random"),
        ("--hepl", "env, got '--hepl'."),
        ("trian --data my/", "txl: The command must be one of demo, data, "),
        ("trian --data my/", "got 'trian'. Did you mean train?\n"),
        ("xyzzy", "got 'xyzzy'.\n"),
        (
            "eval run --mem-len -5 3 --batch-size 0",
            "txl: --batch-size must be at least 1 and at most 1,048,576, got 0.\n"
            "txl: --mem-len must be at least 0, got -5.\n",
        ),
        ("eval run --mem-len 5 --attn-len 7", "txl: --attn-len must be at most --mem-len + 1 = 6, got 7"),
        ("train text-small --data text.txt --out x --model.vocab-size 204", "model.vocab_size must be 256"),
        ("report run nowhere", "nowhere is not a run: it must be a folder"),
        ("report", "at least one run"),
        ("report run --device foo", "torch finds no other here, got 'foo'"),
        ("train --resume --out run --train.max-steps 3", "train.max_steps must be at least 4, the step that run has"),
        ("train text-small --data text.txt --out x --corpus.extend-vocab", "corpus.extend_vocab needs --init"),
        ("train text-words --data text.txt --out x --corpus.unit bpe --corpus.extend-vocab", 'for corpus.unit = "bpe"'),
        ("train text-words --data text.txt --out x --corpus.vocab 'a\rb'", "vocab must be a file, and a\\rb is none."),
        ("train text-words --data text.txt --out x --corpus.vocab .", "corpus.vocab must be a file, and . is none."),
        (
            "train text-small --data text.txt --out x --model.kind lstm --train.recompute true",
            "\ntxl: train.recompute must be false for kind = lstm, which cannot recompute layers. Leave it out.\n",
        ),
        ("eval run --sliding 9", "--sliding must be at least 1 and at most 7, got 9"),
        ("eval run --sliding 0 --tgt-len 5", "--sliding must be at least 1 and at most 5, got 0"),
        ("eval run --sliding 1 --mem-len 8", "--sliding reads windows without memory: leave out"),
        ("eval run --sliding 1 --same-length", "--sliding reads windows without memory: leave out"),
        ("eval run --sliding 1 --attn-len 3", "--sliding reads windows without memory: leave out"),
        ("eval run --dynamic sgd --precision fp16", "--precision must be auto, fp32 or bf16 with --dynamic"),
        ("eval run --dynamic-lr 0.1", "--dynamic-lr needs --dynamic sgd or rms"),
        ("eval run --dynamic sgd --dynamic-epsilon 0.1", "--dynamic-epsilon needs --dynamic rms"),
        ("eval run --dynamic rms --dynamic-epsilon 0", "--dynamic-epsilon must be above 0"),
        ("eval run --dynamic rms --dynamic-lr -1", "--dynamic-lr must be at least 0 and at most"),
        ("eval run --temperature 0", "--temperature must be above 0, got 0.0"),
        ("train", "RECIPE or --data must be given"),
        ("train --resume", "RECIPE or --data must be given"),
        ("train --out nowhere --resume auto", "RECIPE or --data must be given"),
        ("train --data nope --out x", "there is no nope"),
        ("train --data empty.txt --out x", "empty.txt has nothing for the train split: it is empty"),
        ("train --data scored --out x", "must have a train split"),
        ("data --source copy --newlines keep", "txl: NAME must be given with --source, --newlines: one of enwik8, "),
        ("recipes ptb-smal", "Did you mean ptb-small?"),
        ("demo --minutes 0.05 --out x", "--minutes must be at least 0.1 and below 1,000,000"),
        ("demo --minutes nan --out x", "--minutes must be at least 0.1 and below 1,000,000"),
        ("paper table-11", "EXHIBIT must be one of table-1, "),
        ("paper table-6 --size toy --rows our", "--rows must be some of ours, shaw, "),
        ("paper table-6 --size toy --jobs 0", "--jobs must be at least 1, got 0."),
        ("paper appendix-e --size small", "appendix-e has no models of size small. Give --size toy or paper."),
        ("paper table-6 --rows ours", "--rows: only for models to train. Give --size too"),
        ("paper --seeds 4 --again", "--seeds, --again: only for models to train. Give --size too"),
        ("paper table-1 --size small --rows wikitext103-large", "wikitext103-large has no models of size small. Give"),
        ("paper table-1 --size toy --launch nowhere", "nowhere: No such file or directory."),
        ("paper table-1 --size toy --launch '\"a'", "--launch must be a command, got"),
    ],
)
def test_a_refusal_names_the_cause_and_a_way_out(line, sentence, home, capsys):
    Path("one.jsonl").write_text(json.dumps({"text": "a b c " * 999}) + "\n")
    Path("latin.txt").write_bytes(b"a\n\xe9\n")
    Path("empty.txt").touch()
    Path("scored").mkdir(exist_ok=True)
    Path("scored/test.txt").write_text("no split to train on")
    Path("none").mkdir(exist_ok=True)
    Path("none", "environment.json").write_text("{}")
    shutil.copy("run/config.toml", "none")
    assert main(words(line)) == 2
    told = capsys.readouterr().err
    assert sentence in told and told.count("\n") == max(sentence.count("\n"), 1)
    assert not Path("x").exists()


def test_what_a_run_leaves_out_is_said(home, capsys):
    line = "train text-words --data text.txt --init run --out 'a b' --train.average-from 9 --train.min-lr-ratio 0.1"
    told = "No weights are averaged: train.average_from = 9 is not before the last step."
    assert told in printed([*words(line), *TINY], capsys)
    assert main(words("generate run --prompt the --max-tokens 9 --stop zzz")) == 0
    shown = capsys.readouterr()
    assert f"{len(shown.out) - len('the') - 1} characters in" in shown.err, "a text may have ended earlier"


def test_a_title_names_only_what_differs_from_training(home, capsys):
    assert ";" not in printed("eval run", capsys).splitlines()[0]
    changed = "; windows sliding by 3; temperature 0.5; dynamic rms, lr 0.25, decay 0.5, epsilon 0.1"
    asked = "eval run --sliding 3 --temperature 0.5 --dynamic rms --dynamic-lr 0.25 --dynamic-decay 0.5"
    assert changed in printed(asked, capsys).splitlines()[0]
    title = printed("eval run --dynamic sgd", capsys).splitlines()[0]
    assert "; dynamic sgd, lr " in title and "epsilon" not in title


def test_a_home_that_cannot_be_written_is_told_with_its_variable(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 100)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TXL_HOME", str(tmp_path / "file" / "cache"))
    monkeypatch.chdir(tmp_path)
    assert main(["train", "text-small", "--data", "text.txt", "--out", "run", *TINY]) == 2
    said = capsys.readouterr().err
    assert "cache/texts/" in said and f"txl: Or set TXL_HOME to another folder than {tmp_path}/file/cache.\n" in said
    assert main(["train", "text-small", "--data", "text.txt", "--out", f"{tmp_path}/file/cache-2", *TINY]) == 2
    assert "could not be written" in (said := capsys.readouterr().err) and "TXL_HOME" not in said
