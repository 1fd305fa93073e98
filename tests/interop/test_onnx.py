"""Exported graphs: the model's numbers for any rows, segments and memory, in PyTorch and in onnxruntime."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import VARIANTS, small_model, text
from torch import Tensor

from transformer_xl.commands.main import main
from transformer_xl.config.settings import Lengths, RunConfig, TrainConfig
from transformer_xl.data.vocab import Vocab
from transformer_xl.interop import onnx
from transformer_xl.mistake import Mistake
from transformer_xl.run.checkpoint import load_model, save_checkpoint

onnxruntime = pytest.importorskip("onnxruntime")
EXAMPLE = Path(__file__).parents[2] / "examples/stream_onnx.py"
KINDS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "shaw": (VARIANTS["bands"] | {"kind": "shaw", "positions": 9, "gate": "gru", "untie_r": False}, {}),
    "al-rfou": ({"kind": "al-rfou", "positions": 12}, {"mem_len": 0}),
}
NGRAMS = {"ngrams": (1, 3), "ngram_rows": 37, "ngram_width": 6, "matches": (2,), "match_window": 7}
BYTES = Vocab.build("byte", [])
LENGTHS = Lengths(tgt_len=12, mem_len=16)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a byte model with random weights and the state of all kinds."""
    model = small_model(dtype=torch.float32, vocab_size=256, n_layer=1, document_end=1, untie_r=True, **NGRAMS)
    config = RunConfig(model=model.config, train=TrainConfig(tgt_len=12, mem_len=16))
    return save_checkpoint(tmp_path_factory.mktemp("onnx") / "run", model=model, vocab=BYTES, config=config)


def session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options)


def run(graph: Any, *given: Tensor) -> list[Tensor]:
    names = [each.name for each in graph.get_inputs()]
    found = graph.run(None, dict(zip(names, (each.numpy() for each in given), strict=True)))
    return [torch.from_numpy(each) for each in found]


@torch.no_grad()
def largest_error(model: Any, lengths: Lengths, *readers: Any) -> float:
    """Of the log-probabilities of a text in pieces of 1, of the longest length, and shorter ones after a full memory;
    of any number of rows."""
    stream, errors = onnx.Stream(model, lengths), []
    pieces = [min(size, lengths.tgt_len) for size in (1, 1, 5, 12, 12, 1, 3, 12, 8)]
    for rows in (1, 2, 8):
        ids, memory = text(rows, sum(pieces)), model.empty_memory(rows, lengths)
        states = [stream.start(rows)] * len(readers)
        for piece in ids.split(pieces, dim=1):
            expected, memory = model.log_probs(piece, memory, lengths)
            for i, read in enumerate(readers):
                found, *states[i] = read(piece, *states[i])
                errors.append((found - expected).abs().max())
    return float(torch.stack(errors).max())


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_in_pieces_has_the_models_log_probabilities(kind, tmp_path):
    """Of models without other state; `trained` has it."""
    shape, windows = KINDS[kind]
    lengths = replace(LENGTHS, **windows)
    model = small_model(dtype=torch.float32, n_layer=1, **shape)
    stream = onnx.Stream(model, lengths)
    stream.write_onnx(tmp_path / "model.onnx")
    graph = partial(run, session(tmp_path / "model.onnx"))
    assert largest_error(model, lengths, graph, stream.program.module()) <= 1e-5


def test_a_backbone_reads_vectors(tmp_path):
    """Of two layers, at lengths below those of the call that a graph is made of. An export takes four seconds for each
    layer, so all others have one."""
    shape = {"share_position_projection": True, "pre_lnorm": True, "final_norm": True, "qk_norm": True}
    backbone = small_model(dtype=torch.float32, n_layer=2, **shape).backbone
    lengths = Lengths(tgt_len=1, mem_len=3)
    stream, memory = onnx.Stream(backbone, lengths), None
    stream.write_onnx(tmp_path / "model.onnx")
    graph = session(tmp_path / "model.onnx")
    assert [each.name for each in graph.get_outputs()] == ["outputs", "next_memory"]
    readers = [partial(run, graph), stream.program.module()]
    x, states = torch.randn(2, 9, backbone.config.d_model), [stream.start(2)] * 2
    for piece in x.split(1, dim=1):
        outputs, memory = backbone(piece, memory, lengths)
        for i, read in enumerate(readers):
            found, *states[i] = read(piece, *states[i])
            torch.testing.assert_close(found.detach(), outputs[-1].detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [{"zero_memory": True}, {"kind": "lstm"}])
def test_another_memory_is_refused(kind):
    with pytest.raises(Mistake, match=r"zero_memory.*lstm or qrnn"):
        onnx.Stream(small_model(**kind), LENGTHS)


@pytest.mark.parametrize("more", [[], pytest.param(["--int8"], marks=pytest.mark.outside)], ids=["whole", "int8"])
def test_a_run_is_exported_and_streams_without_this_package(more, trained, tmp_path):
    """The example reads bytes."""
    line = ["convert", str(trained), "--to-format", "onnx", "--to", str(tmp_path / "whole")]
    windows = ["--eval.mem-len", "20", "--eval.attn-len", "6", "--eval.clamp-len", "4"]
    assert main([*line, *windows, *more]) == 0
    graph = session(tmp_path / "whole" / "model.onnx")
    about = graph.get_modelmeta().custom_metadata_map
    assert about["mem_len"] == "20" and about["clamp_len"] == "4"
    model = load_model(trained).model
    lengths = Lengths(**{name: json.loads(about[name]) for name in asdict(LENGTHS)})  # the quantiser adds more
    error = largest_error(model, lengths, partial(run, graph))
    assert 1e-5 < error < 0.5 if more else error <= 1e-5, "weights of int8 change the numbers a little"
    written = subprocess.run(
        [sys.executable, "-I", EXAMPLE, tmp_path / "whole", "the "], capture_output=True, timeout=60
    )
    assert written.returncode == 0 and len(written.stdout) == 500, written.stderr


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--int8"], "--int8 is for --to-format onnx"),
        (["--to-format", "onnx", "--train.lr", "3"], "takes only the lengths of eval, got train.lr"),
        (["--to-format", "onnx", "--eval.context-len", "8"], "eval.context_len must be 0 for ONNX"),
        (["--to-format", "onnx", "--eval.mem-len", "-3"], "eval.mem_len must be"),
    ],
)
def test_options_that_do_not_fit_are_refused(trained, tmp_path, capsys, more, told):
    assert main(["convert", str(trained), "--to", str(tmp_path / "new"), *more]) == 2
    assert told in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_a_missing_package_is_named(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(onnx, "find_spec", lambda name: None)
    assert main(["convert", str(trained), "--to", str(tmp_path / "new"), "--to-format", "onnx"]) == 2
    assert "needs the package onnx" in capsys.readouterr().err
