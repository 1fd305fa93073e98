"""Bad input works or gets a sentence and status 2: never a traceback, a hang, wrong numbers or half a file."""

from __future__ import annotations

import ast
import json
import os
import random
import shutil
import sys
import tempfile
import typing
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from shlex import split as words
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
from amount import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mangled import ODD_TEXTS, mangled
from tiny_runs import TINY

import transformer_xl
from transformer_xl.commands.attention import Attention
from transformer_xl.commands.length import Length
from transformer_xl.commands.main import COMMANDS, command_class, main, users_sentence
from transformer_xl.commands.recl import Recl
from transformer_xl.config.recipe import TYPES, load_recipe
from transformer_xl.config.settings import CorpusConfig, Unit
from transformer_xl.data.corpus import Corpus, Header
from transformer_xl.data.datasets import open_corpus
from transformer_xl.data.reading import Span, pieces, read_file, read_text
from transformer_xl.data.vocab import Vocab
from transformer_xl.run.folder import Run

TEXT = "the quick brown fox jumps over the lazy dog\n" * 20
CHECKPOINT = "run/checkpoints/step_00000004"
several = settings(max_examples=examples(15))
dice = st.integers(0, 2**32).map(random.Random)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a text, a run of bytes and one of words, a store of each, a pipe; and a cache of its own."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("text.txt").write_text(TEXT)
        os.mkfifo("pipe")
        reader, writer = os.pipe()
        Path("shell").symlink_to(f"/dev/fd/{reader}")  # as `<(command)` of a shell
        assert main(["train", "text-small", "--data", "text.txt", "--out", "run", *TINY]) == 0
        assert main(["train", "text-words", "--data", "text.txt", "--out", "words", *TINY]) == 0
        splits = {name: TEXT.encode() for name in ("train", "valid", "test")}
        Corpus.build("bytes-store", splits, name="bytes")
        Corpus.build("words-store", splits, CorpusConfig(unit="word"), name="words")
        yield folder
        os.close(reader), os.close(writer)


@pytest.fixture
def copied(home: Path) -> Callable[[str], Path]:
    """Copies a folder to `odd`, where a test damages it."""

    def copy(folder: str) -> Path:
        shutil.rmtree("odd", ignore_errors=True)
        return Path(shutil.copytree(folder, "odd"))

    return copy


def tried(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The status of a command and its mistakes; checks that no file stays half-written."""
    capsys.readouterr()
    status = main(arguments)
    shown = capsys.readouterr()
    assert status in (0, 2) and "Traceback" not in shown.err, shown.err
    if status:
        lines = shown.err.splitlines()
        assert lines and all(line.startswith("txl: ") and line.endswith((".", "?")) for line in lines), shown.err
        assert shown.out == ""
    assert not list(Path().rglob(".tmp-*"))
    return status, shown.err if status else shown.out


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    status, told = tried(arguments, capsys)
    assert status == 2, f"{arguments} gave {told}"
    return told


class TestOptions:
    """All options, with values made from their types."""

    OWNERS: typing.ClassVar[dict[tuple[str, ...], type]] = {
        **{(name,): command_class(name) for name in COMMANDS},
        **{("analyse", part.__name__.lower()): part for part in (Recl, Length, Attention)},
    }
    LINES: typing.ClassVar[dict[str, str]] = {
        "eval": "eval run --mem-len 3 --tgt-len 30",
        "eval dynamic": "eval run --mem-len 3 --tgt-len 30 --dynamic rms --dynamic-tokens 50",
        "score": "score run text.txt",
        "generate": "generate run --max-tokens 2",
        "analyse recl": "analyse recl run --step 5 --max-context 10 --positions 10",
        "analyse length": "analyse length run --attn-len 3",
    }
    """A command that ends soon, behind which one more option is given."""

    @staticmethod
    def kinds(hint: Any) -> set[Any]:
        """The plain types that an option takes: int for `tuple[int | None, ...]`."""
        if get_origin(hint) is Literal:
            return {Literal}
        inner = get_args(hint)
        return set().union(*map(TestOptions.kinds, inner)) if inner else {hint} - {type(None), ...}

    @pytest.mark.parametrize("line", LINES)
    def test_a_number_at_or_beyond_the_limits_is_refused_or_works(self, home, line, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "matplotlib", None)  # one picture is like another
        before = words(self.LINES[line])
        owner = self.OWNERS[tuple(before[: 2 if before[0] == "analyse" else 1])]
        for option, hint in typing.get_type_hints(owner).items():
            values = ["-1", "0", str(10**30)] if int in self.kinds(hint) else []
            values += ["-1", "nan", "inf", "1e-320", "1e308"] if float in self.kinds(hint) else []
            if option.startswith("dynamic") != line.endswith("dynamic"):
                continue
            for value in values if (option, line) != ("max_tokens", "generate") else values[:2]:
                status, told = tried([*before, f"--{option.replace('_', '-')}", value], capsys)
                assert status == 2 or not {"-1", "nan", "inf"} & {value} or option in ("seed", "device"), (option, told)

    @pytest.mark.parametrize(
        ("line", "told"),
        [
            ("eval run --dynamic-tokens 1e3x", 'it must be a whole number, got "1e3x"'),
            ("eval run --tgt-len long", 'it must be a whole number, got "long"'),
            ("eval run --mem-len 3 b", 'it must be a list of whole numbers, got [3, "b"]'),
            ("eval run --mem-len", "it must be a list of whole numbers, got []"),
            ("generate run --temperature a", 'it must be a number, got "a"'),
            ("eval run --tgt-len none", 'it must be a whole number, got "none"'),  # it would mean the default
            ("score run file --mem-len None", 'it must be a whole number, got "None"'),
            ("analyse recl run --step none", 'it must be a whole number, got "none"'),
        ],
    )
    def test_a_number_is_refused_in_our_own_words(self, line, told, capsys):
        """tyro's own name Python's classes, and it takes a list without values for the default."""
        with pytest.raises(SystemExit) as exit:
            main(words(line))
        shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
        assert exit.value.code == 2 and told in shown, shown

    def test_a_setting_of_another_type_is_refused_by_name(self, tmp_path):
        wrong = {int: ["1.5", '"a"', "true", "[1]", "{a=1}", str(10**30), "1979-05-27"], float: ["nan", "inf", '"a"']}
        wrong |= {bool: ["1", '"yes"'], str: ["1", "[1]"], Literal: ['"nonsense"', "3"]}
        for name, hint in TYPES.items():
            values = set.intersection(*(set(wrong[kind]) for kind in self.kinds(hint)))
            assert values, f"no value is wrong for {name}"
            for value in sorted(values - ({"[1]"} if get_origin(hint) is tuple else set())):
                (tmp_path / "recipe.toml").write_text(f"{name} = {value}\n")
                with pytest.raises(ValueError, match=rf"^{name} must be ") as error:
                    load_recipe(tmp_path / "recipe.toml")
                assert users_sentence(error.value) is not None

    @pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000, "[1979-05-27]", "[nan, {a = 1}]"])
    def test_a_number_that_python_cannot_print_is_refused(self, tmp_path, value):
        (tmp_path / "recipe.toml").write_text(f"[train]\nlr = {value}\n")
        with pytest.raises(ValueError, match=r"train\.lr must be a number|recipe\.toml") as error:
            load_recipe(tmp_path / "recipe.toml")
        assert len(str(users_sentence(error.value))) < 600


class TestFiles:
    """Other things in place of a file."""

    OPTIONS: typing.ClassVar[list[str]] = [
        *("train {}", "train --data {}", "train text-small --data {}", "train text-small --data text.txt --init {}"),
        *("train text-small --data text.txt --resume --out {}", "train text-small --data text.txt --out {}"),
        "train text-words --data text.txt --corpus.vocab {}",
        *("eval {}", "eval run --data {}", "score {} text.txt", "score run {}"),
        *("generate {}", "generate run --prompt @{}"),
        *("analyse recl {}", "analyse attention run --data {}", "analyse attention run --out {}"),
        *("analyse length run --attn-len 3 --out {}", "report {}", "report run --out {}", "demo --out {}"),
        *(f"convert {{}} --from {program} --to new" for program in ("original", "tensorflow", "huggingface", "nvidia")),
        *("convert {} --to-format huggingface --to new", "convert run --to-format huggingface --to {}"),
        "data enwik8 --source {}",
    ]

    @pytest.mark.parametrize("line", OPTIONS)
    def test_a_pipe_or_a_device_is_refused_at_once_by_the_name_that_was_given(self, home, line, capsys):
        for source in ("pipe", "/dev/zero", "shell") if "--out" not in line else ["pipe"]:  # a bug would write there
            told = refused(words(line.format(source)), capsys)
            assert source in told
            assert Path("pipe").is_fifo() and not Path("new").exists()

    PARTS: typing.ClassVar[list[tuple[str, str, str]]] = [
        *product(["run"], ["config.toml", "metrics.jsonl", "environment.json"], ["report odd"]),
        *product(["bytes-store"], ["vocab.json", "test.bin"], ["eval run --data odd"]),
        *product([CHECKPOINT], ["config.json", "vocab.json", "model.safetensors", "SHA256SUMS"], ["eval odd"]),
    ]

    @pytest.mark.parametrize(("folder", "file", "line"), PARTS)
    @pytest.mark.parametrize("device", ["pipe", "/dev/zero"])
    def test_a_folder_with_a_pipe_or_a_device_is_refused_at_once(self, copied, folder, file, line, device, capsys):
        odd = copied(folder)
        (odd / file).unlink()
        (odd / file).symlink_to(Path(device).absolute())
        assert f"odd/{file}" in refused(words(line), capsys)

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe{\0}\0", b"[" * 9999])
    @pytest.mark.parametrize("line", ["eval odd", "train text-small --out odd --resume"])
    def test_a_damaged_file_of_a_run_is_named(self, copied, content, line, capsys):
        copied("run")
        Path("odd/environment.json").write_bytes(content)
        assert "odd/environment.json" in refused(words(line), capsys).replace(os.sep, "/")

    @pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="Linux's /proc")
    @pytest.mark.parametrize("line", ["score run {}", "generate run --prompt @{}", "eval odd"])
    def test_a_file_on_a_bad_disk_is_named(self, copied, line, capsys):
        """Where `open` works and `read` does not, the error has no file's name."""
        config = copied(CHECKPOINT) / "config.json"
        config.unlink()
        config.symlink_to("/proc/self/mem")
        assert f"{config}: Input/output error" in refused(words(line.format(config)), capsys)

    def test_a_file_without_read_permission_is_named(self):
        user = os.geteuid()
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            file = Path(folder) / "text.toml"
            file.touch(mode=0)
            reads = [read_file, load_recipe, lambda file: read_text(str(file))]
            reads += [
                lambda file: open_corpus(CorpusConfig(name=str(file))),
                lambda file: list(pieces(Span(file), "word")),
            ]
            os.seteuid(user or 65534)  # root may read everything
            try:
                for read in reads:
                    with pytest.raises(OSError) as error:
                        read(file)
                    assert "Permission denied" in str(users_sentence(error.value))
            finally:
                os.seteuid(user)

    CONTENTS: typing.ClassVar[dict[str, bytes]] = {
        "empty": b"",
        "one byte": b"a",
        "two bytes": b"ab",
        "NUL": b"a\0b\n" * 50,
        "not UTF-8": b"a \xff\xfe\n" * 50,
        "half a pair": b"a\xed\xa0\x80b\n" * 50,
        "cut in a character": "\u00e9 ".encode() * 100 + b"\xc3",
        "CRLF": b"the quick\r\nbrown fox\r\n" * 20,
        "CR": b"the quick\rbrown fox\r" * 20,
        "BOM": b"\xef\xbb\xbfthe quick\n" * 20,
        "one line": b"the quick " * 40,
        "one word": b"x" * 400,
        "no newline at the end": b"the quick\nbrown" * 20,
        "newlines": b"\n" * 200,
        "spaces": b" " * 200,
        "odd spaces": "a\u2028b\u0085c\x1cd\u00a0e ".encode() * 50,
        "symbols of ours": b"<eos> <unk> <S> <UNK>\n" * 30,
    }

    @pytest.mark.parametrize("title", CONTENTS)
    def test_a_text_is_scored_whole_or_refused(self, home, title, capsys):
        Path("data.txt").write_bytes(self.CONTENTS[title])
        Path("data").mkdir(exist_ok=True)
        Path("data/x.test.txt").write_bytes(self.CONTENTS[title])
        for run, unit in (("run", "byte"), ("words", "word")):
            status, told = tried(["eval", run, "--data", "data", "--mem-len", "5", "--json"], capsys)
            if status == 0:
                text = self.CONTENTS[title]
                symbols = len(text) if unit == "byte" else len(text.decode().replace("\n", " <eos> ").split())
                symbols += unit == "word" and not text.endswith(b"\n")  # a last line gets its end
                assert json.loads(told)["results"][0]["targets"] == symbols - 1
            else:
                assert "x.test.txt" in told or "data" in told
            tried(["score", run, "data.txt"], capsys)
            tried(["generate", run, "--prompt", "@data.txt", "--max-tokens", "2"], capsys)

    @pytest.mark.parametrize("unit", ["byte", "char", "word", "bpe"])
    @pytest.mark.parametrize("title", CONTENTS)
    def test_a_text_is_restored_or_refused(self, home, title, unit: Unit):
        Path("data.txt").write_bytes(self.CONTENTS[title])
        try:
            corpus = open_corpus(CorpusConfig(name="data.txt", unit=unit, bpe_size=270))
        except (ValueError, OSError) as error:
            assert "data.txt" in str(users_sentence(error))
            return
        ids = np.concatenate([corpus.split(name).ids for name in ("train", "valid", "test")])
        back, text = corpus.vocab.decode_bytes(ids), self.CONTENTS[title]
        if unit == "word":  # of which white space is not kept, nor what is unknown
            assert corpus.vocab.unk in ids or back.decode().split() == text.decode().removeprefix("\ufeff").split()
        else:
            assert back == (text if unit == "byte" else text.removeprefix(b"\xef\xbb\xbf"))

    @pytest.mark.timeout(20)
    def test_the_time_for_one_long_word_is_linear_in_its_length(self):
        """With quadratic time this took a minute."""
        for unit in ("word", "bpe"):
            assert b"".join(pieces(b"x" * (1 << 22), unit, 1 << 9)).count(b"x") == 1 << 22


def figures(told: str) -> list[float]:
    return [json.loads(told)["results"][0][name] for name in ("loss", "targets")]


@pytest.fixture
def whole(home, capsys) -> list[float]:
    return figures(tried(words("eval run --data bytes-store --json --mem-len 5"), capsys)[1])


@several
@given(dice=dice)
def test_a_damaged_store_is_refused_or_gives_the_same_figures(dice, copied, whole, capsys):
    file = dice.choice(sorted(copied("bytes-store").iterdir()))
    other = dice.choice(sorted(Path("words-store").iterdir())).read_bytes()
    file.write_bytes(other if dice.random() < 0.2 else mangled(dice, file.read_bytes(), other))
    status, told = tried(words("eval run --data odd --json --mem-len 5"), capsys)
    assert ("odd" in told) if status else figures(told) == whole


class TestPrompts:
    """Prompts for a model to continue."""

    @several
    @given(
        prompt=st.text(st.characters(codec=None), max_size=30) | st.sampled_from(ODD_TEXTS),
        run=st.sampled_from(["run", "words"]),
    )
    def test_any_prompt_is_continued(self, prompt, run, home, capsys):
        assume(prompt != "-" and not prompt.startswith("@"))  # standard input, and files
        status, told = tried(["generate", run, "--max-tokens", "2", "--json", f"--prompt={prompt}"], capsys)
        refused = not prompt.isprintable() or any("\ud800" <= c <= "\udfff" for c in prompt)
        assert json.loads(told)["text"] is not None if status == 0 else refused, told
        tried(["generate", run, "--max-tokens", "2", f"--prompt={prompt}"], capsys)

    def test_a_prompt_of_invalid_bytes_is_continued(self, home, capsys):
        status, told = tried(["generate", "run", "--max-tokens", "2", "--json", "--prompt", "\udcff"], capsys)
        assert (status, json.loads(told)["prompt"]) == (0, "\ufffd"), "a lone surrogate is no JSON for strict readers"

    @pytest.mark.parametrize("temperature", ["1e-320", "1e-300", "1e-40", "1e308"])
    def test_any_temperature_gives_finite_losses(self, home, temperature, capsys):
        _, greedy = tried(words("generate run --max-tokens 5 --json --prompt the --temperature 0"), capsys)
        _, drawn = tried(
            ["generate", "run", *words("--max-tokens 5 --json --prompt the --temperature"), temperature], capsys
        )
        assert temperature == "1e308" or drawn == greedy
        status, scored = tried(["eval", "run", "--json", "--temperature", temperature], capsys)
        if status:  # a processor that lets the smallest numbers become 0
            assert temperature == "1e-320" and scored.startswith("txl: --temperature must be above 0, got 0.0.")
        else:
            assert json.loads(scored)["results"][0]["loss"] >= 0


class TestSupply:
    """Nothing from a file reaches a shell, a path outside its folder or an unpickler."""

    FORBIDDEN: typing.ClassVar[set[str]] = {
        *("os.system", "os.popen", "os.execv", "os.execvp", "os.spawnv", "subprocess.call", "subprocess.run"),
        *("subprocess.check_output", "subprocess.getoutput", "eval", "exec", "compile", "__import__"),
        *("pickle.load", "pickle.loads", "torch.load", "joblib.load", "yaml.load", "shelve.open", "marshal.loads"),
        *("numpy.load", "np.load", "tarfile.extractall", "shutil.unpack_archive", "runpy.run_path"),
    }

    ALLOWED: typing.ClassVar[set[tuple[str, str]]] = {
        ("subprocess.run", "native/__init__.py"),
        ("torch.load", "interop/pickles.py"),
    }
    """The compiler of our own C++ source, and the reader of foreign checkpoints."""

    def test_the_package_never_executes_what_it_reads(self):
        for file in Path(transformer_xl.__file__).parent.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.Call):
                    name = ast.unparse(node.func)
                    allowed = (name, "/".join(file.parts[-2:])) in self.ALLOWED
                    assert allowed or name not in self.FORBIDDEN, f"{file}:{node.lineno}"
                    assert not any(word.arg in ("shell", "trust_remote_code") for word in node.keywords), file

    @pytest.mark.parametrize("name", ["../outside", "/outside", "valid/../../outside", "other"])
    def test_a_store_cannot_name_a_file_outside_its_folder(self, tmp_path, name):
        store = Corpus.build(tmp_path / "store", {"test": b"abab"}, vocab=Vocab("byte", tuple(b"ab"))).path
        shutil.copy(store / "test.bin", tmp_path / "outside.bin")
        header = Header.read(store / "corpus.json")
        (store / "corpus.json").write_text(json.dumps(replace(header, splits={name: header.splits["test"]}).to_json()))
        with pytest.raises(ValueError, match="damaged: its splits have other names"):
            Corpus.open(store)

    @pytest.mark.parametrize("name", ["hf:../../x", "hf:a/b@../../../run", "hf:a@/run", "hf:..", "hf:a/../../b"])
    def test_a_name_on_the_hub_cannot_lead_outside_the_cache(self, home, name, capsys):
        assert "as the hub writes them" in refused(["eval", name], capsys)


def test_nothing_published_identifies_the_machine(tmp_path, monkeypatch, capsys):
    """Users publish the output of `txl env`, environment.json and the report."""
    own = tmp_path / "home-of-alice"
    mine = {"HOME": str(own), "TXL_HOME": str(own / "cache"), "USER": "alice", "LOGNAME": "alice", "HF_TOKEN": "secret"}
    for name, value in (mine | {"HOSTNAME": "alices-host"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("platform.node", lambda: "alices-host")
    monkeypatch.setattr("socket.gethostname", lambda: "alices-host")
    own.mkdir()
    monkeypatch.chdir(own)
    Path("text.txt").write_text(TEXT)
    command = ["train", "text-small", "--data", str(own / "text.txt"), *TINY]
    assert main([*command, "--out", str(own / "first")]) == 0
    first = Run(own / "first").latest
    copied = shutil.copytree(first, own / "checkpoints" / "copied")
    assert main([*command, "--out", "second", "--init", str(copied)]) == 0
    assert json.loads(Path("second/environment.json").read_text())["init"] == "copied"
    assert main([*command, "--out", "run", "--init", str(first)]) == main(["report", "run"]) == 0
    capsys.readouterr()
    assert main(["env"]) == main(["env", "--json"]) == 0
    published = {"txl env": capsys.readouterr().out, "the report": Path("run/report.html").read_text()}
    assert "~/cache" in published["txl env"]
    published["environment.json"] = Path("first/environment.json").read_text()
    for name, text in published.items():
        for secret in ("alice", "secret", str(tmp_path)):
            assert secret not in text, f"{name} has {secret}"
    assert "text.txt" in (page := published["the report"]) and f"weights of first/checkpoints/{first.name}." in page
