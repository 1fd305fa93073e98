"""Coding by a model's probabilities: every text comes back, and its code is as long as the model says."""

from __future__ import annotations

import io
import json
import math
import zlib
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import small_model

from transformer_xl.config.settings import Lengths
from transformer_xl.data.loader import Segment
from transformer_xl.data.vocab import Vocab
from transformer_xl.evaluation.archive import Archive, Header, Writer
from transformer_xl.evaluation.arithmetic import arithmetic, exact_arithmetic
from transformer_xl.evaluation.coding import BlockCoder, Code, TrainedPredictor, self_test
from transformer_xl.evaluation.score import evaluate
from transformer_xl.mistake import Mistake
from transformer_xl.model.ngram_index import NgramIndex
from transformer_xl.model.ngrams import NgramEmbedding

pytest.importorskip("constriction")
BYTES = Vocab.build("byte", [])
SOME = Vocab("byte", tuple(b"e abc\xff"), "drop")
"""A vocabulary without most bytes."""
LENGTHS = Lengths(tgt_len=1, mem_len=6)
few = settings(max_examples=25, deadline=None)


def predictor(vocab: Vocab = BYTES, rows: int = 3, **shape: Any) -> TrainedPredictor:
    model = small_model(vocab_size=len(vocab), dtype=torch.float32, **shape)
    return TrainedPredictor(model, vocab, LENGTHS, rows, "fp32")


def there_and_back(make: Any, blocks: list[bytes]) -> list[Code]:
    coder = BlockCoder(make())
    codes = [coder.encode(block) for block in blocks]
    decoder = BlockCoder(make())
    assert [decoder.decode(code, len(block)) for code, block in zip(codes, blocks, strict=True)] == blocks
    return codes


@few
@given(st.lists(st.binary(max_size=40), max_size=4), st.integers(1, 9))
def test_any_bytes_come_back(blocks, rows):
    there_and_back(lambda: predictor(rows=rows), blocks)


@few
@given(st.lists(st.binary(max_size=40) | st.text("abc e\n\0", max_size=60).map(str.encode), max_size=4))
def test_bytes_that_the_vocabulary_lacks_come_back(blocks):
    there_and_back(lambda: predictor(SOME), blocks)


@pytest.mark.parametrize("shape", [{"ngrams": (2, 4), "matches": (1, 2), "match_window": 5}, {"qk_norm": True}])
def test_every_kind_of_model_codes(shape):
    there_and_back(lambda: predictor(**shape), [b"abcabcabc" * 9, b"", b"a", b"abcabd" * 7])


def test_a_code_is_as_long_as_the_model_says():
    vocab = Vocab("byte", tuple(b" abcdefghijklmnopqrstuv"))
    model = small_model(dtype=torch.float32)
    ids = torch.randint(23, (1, 900), generator=torch.Generator().manual_seed(0))
    ids[0, 0] = 0
    segments = [Segment(ids[:, i : i + 1], ids[:, i + 1 : i + 2], None) for i in range(899)]
    nats = evaluate(model, segments, LENGTHS, unit="byte").nats
    code = BlockCoder(TrainedPredictor(model, vocab, LENGTHS, 1, "fp32")).encode(
        vocab.decode_bytes(ids[0, 1:].tolist())
    )
    assert not code.raw and abs(len(code.content) - nats / math.log(2) / 8) <= 0.002 * len(code.content) + 8


def test_random_bytes_cost_nothing_and_unknown_newlines_little():
    noise = np.random.default_rng(0).bytes(3000)
    assert BlockCoder(predictor()).encode(noise) == Code(True, noise)
    plain, lines = b"abc abc" * 300, b"abc\nabc" * 300
    sizes = [len(BlockCoder(predictor(SOME)).encode(text).content) for text in (plain, lines)]
    assert sizes[1] < sizes[0] * 1.4


def test_probabilities_that_are_not_numbers_code_nothing():
    broken = predictor()
    broken.next = np.full_like(broken.next, np.nan)
    with pytest.raises(FloatingPointError, match="not numbers"):
        BlockCoder(broken).encode(b"abc")


def test_the_self_test_sees_one_weight():
    model = small_model(dtype=torch.float32, vocab_size=256)
    tests = []
    for _ in range(2):
        tests += [self_test(TrainedPredictor(model, BYTES, LENGTHS, 2, "fp32")) for _ in range(2)]
        with torch.no_grad():
            model.backbone.layers[1].feed_forward.inner.weight[0, 0] += 1e-3
    assert tests[0] == tests[1] != tests[2] == tests[3]


@pytest.mark.parametrize("streams", [1, 4])
def test_the_index_finds_the_rows_of_a_segment(streams):
    ngrams = NgramEmbedding((1, 2, 3, 4, 8), (997,) * 5 + (21,) * 3, 4, 8, matches=(2, 3, 5), window=37)
    ids = torch.randint(20, (streams, 300), generator=torch.Generator().manual_seed(0))
    ids = ids * (torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) > 0.5)
    index = NgramIndex(ngrams, streams)
    rows = np.stack([index.add(column) for column in ids.T.numpy()], 1)
    np.testing.assert_array_equal(rows, ngrams.rows_of(ids, 300).numpy())


def test_a_shared_match_is_in_any_stream():
    ngrams = NgramEmbedding((), (51, 51), 4, 8, matches=(2, 3), window=100)
    index = NgramIndex(ngrams, 2, shared=(3,))
    rows = [index.add(column) for column in np.array([[1, 2, 3, 4, 0, 0, 0, 0], [9, 8, 7, 6, 1, 2, 3, 5]]).T]
    own, shared = rows[6][1]
    assert own == 0 and shared == 51 + 4 + 1


HEADER = Header(rows=2, block=64, threads=1, precision="fp32", test="t", machine={"torch": "2"}, learner="1")


def archive_of(*texts: bytes, header: Header = HEADER) -> bytes:
    stream = io.BytesIO()
    writer = Writer(stream, header)
    for text in texts:
        writer.block(text, Code(True, text))
    writer.end()
    assert writer.size == len(stream.getvalue())
    return stream.getvalue()


def test_an_archive_keeps_its_header_and_blocks():
    content = archive_of(b"one", b"two")
    archive = Archive(io.BytesIO(content), "a")
    assert archive.header == HEADER
    assert [block.code.content for block in archive.blocks()] == [b"one", b"two"]
    assert archive.length == 6 and archive.size == len(content)


def test_every_change_of_an_archive_is_refused():
    content = archive_of(b"one", b"three")
    changed = [content[:end] for end in range(len(content))]
    changed += [content[:i] + bytes([content[i] ^ 1 << i % 8]) + content[i + 1 :] for i in range(len(content))]
    changed += [content + b"\0", b"", b"any other file" * 9]
    for each in changed:
        with pytest.raises(Mistake, match=r"^a .*\.$"):
            list(Archive(io.BytesIO(each), "a").blocks())


@pytest.mark.parametrize(
    "values",
    [
        *({"rows": 0}, {"rows": True}, {"block": 1 << 40}, {"threads": 10**6}, {"machine": []}, {"machine": {"a": []}}),
        *({"model": "x"}, {"learner": ""}, {"new": 1}, {"test": None}, {"lengths": {"mem_len": None}}),
        *({"learner": "", "model": "x", "lengths": lengths} for lengths in ({}, {"new": 1}, {"mem_len": -1})),
    ],
)
def test_a_header_that_no_encoder_writes_is_refused(values):
    packed = zlib.compress(json.dumps(asdict(HEADER) | values).encode())
    content = archive_of()[:8] + len(packed).to_bytes(4, "little") + packed
    content += zlib.crc32(content).to_bytes(4, "little")
    with pytest.raises(Mistake, match="a has a header"):
        Archive(io.BytesIO(content), "a")


def test_arithmetic_names_the_versions_and_restores_the_settings():
    assert arithmetic()["torch"] == version("torch")
    before = torch.get_num_threads()
    with exact_arithmetic(before + 1):
        assert torch.get_num_threads() == before + 1 and torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == before and not torch.are_deterministic_algorithms_enabled()
