"""Checkpoints written by TensorFlow, and what the authors' TensorFlow model computes from them.

    python -m venv tf && tf/bin/pip install tensorflow-cpu numpy
    tf/bin/python tests/golden/make_tensorflow.py tests/golden/tensorflow

The model is a graph of our own after the equations and the variable names of github.com/kimiyoung/transformer-xl, tf/.
Weights are random everywhere: no bias is zero and no norm is one. `bundles.zip` holds checkpoints for the reader alone.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import zipfile
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1

VOCAB, BATCH, SEGMENTS, STEP = 41, 2, 4, 7


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and how it is called."""

    dtype: str = "float64"
    cutoffs: tuple[int, ...] = ()
    d_model: int = 8
    d_embed: int = 8
    div_val: int = 1
    untie_r: bool = False
    proj_same_dim: bool = True
    tied: str = "none"
    """Which bands of the softmax use the embedding's projection: none, all_but_first or all."""
    tgt_len: int = 5
    mem_len: int = 7
    clamp_len: int = -1
    same_length: bool = False
    n_layer: int = 2
    full_cutoffs: bool = True
    """corpus-info.json holds 0 and the vocabulary's size around the cutoffs."""
    slots: bool = False
    """With the optimizer's variables, after a step of training."""
    words: bool = False
    """With the vocabulary, cache.pkl."""
    seed: int = 0
    n_head: int = field(default=3, init=False)
    d_head: int = field(default=5, init=False)
    d_inner: int = field(default=11, init=False)

    @property
    def edges(self) -> list[int]:
        return [0, *self.cutoffs, VOCAB]

    def ties(self, band: int) -> bool:
        return {"none": False, "all_but_first": band > 0, "all": True}[self.tied]

    def flags(self) -> dict[str, object]:
        """As the authors' scripts give them."""
        names = ("n_layer", "d_model", "n_head", "d_head", "d_inner", "d_embed", "div_val", "untie_r", "proj_same_dim")
        names += ("tgt_len", "mem_len", "clamp_len", "same_length")
        shared = {"proj_share_all_but_first": self.tied == "all_but_first"}
        return {name: getattr(self, name) for name in names} | shared | {"dropout": 0.1, "dropatt": 0.0}


GOLDEN = {
    "wt103": Case(
        cutoffs=(11, 23), div_val=2, untie_r=True, tied="all_but_first", clamp_len=6, same_length=True, words=True
    ),
    "lm1b": Case(
        cutoffs=(17,),
        div_val=4,
        untie_r=True,
        proj_same_dim=False,
        mem_len=5,
        same_length=True,
        dtype="float32",
        slots=True,
    ),
    "enwik8": Case(mem_len=12, clamp_len=9, n_layer=3),
    "narrow": Case(d_embed=6, mem_len=0, dtype="float32", full_cutoffs=False),
    "one_table": Case(cutoffs=(13, 29), mem_len=3, same_length=True, full_cutoffs=False),
    "own_projections": Case(cutoffs=(13, 29), d_embed=6, untie_r=True, dtype="float32"),
    "shared_projection": Case(cutoffs=(13, 29), d_embed=6, tied="all_but_first", clamp_len=4, n_layer=1),
    "wide": Case(cutoffs=(9, 31), d_embed=16, div_val=2, proj_same_dim=False, tied="all", n_layer=1),
}


class Graph:
    """The model of a case. Everything is time first: [T, B, ...]."""

    def __init__(self, case: Case):
        self.case, self.dtype = case, tf.as_dtype(case.dtype)
        self.rng = np.random.default_rng(case.seed)
        self.ids, self.targets = (tf1.placeholder(tf.int32, [case.tgt_len, BATCH]) for _ in range(2))
        shape = [case.mem_len, BATCH, case.d_model]
        self.mems = [tf1.placeholder(self.dtype, shape) for _ in range(case.n_layer)]
        with tf1.variable_scope("transformer"):
            self.nll, self.new_mems = self.model()
        self.variables = tf1.trainable_variables()
        self.gradients = [tf.convert_to_tensor(g) for g in tf1.gradients(tf.reduce_mean(self.nll), self.variables)]

    def variable(self, name: str, *shape: int, mean: float = 0.0) -> tf.Tensor:
        return tf1.get_variable(name, initializer=self.rng.normal(mean, 0.3, shape).astype(self.case.dtype))

    def model(self) -> tuple[tf.Tensor, list[tf.Tensor]]:
        case = self.case
        pair = [case.n_layer] * case.untie_r + [case.n_head, case.d_head]
        u, v = self.variable("r_w_bias", *pair), self.variable("r_r_bias", *pair)
        with tf1.variable_scope("adaptive_embed"):
            x, tables, projections = self.embed()
        new_mems = []
        for i, mem in enumerate(self.mems):
            past = tf.concat([mem, x], 0)
            new_mems.append(past[-case.mem_len :] if case.mem_len else mem)
            with tf1.variable_scope(f"layer_{i}"):
                with tf1.variable_scope("rel_attn"):
                    x = self.attend(x, past, *((u[i], v[i]) if case.untie_r else (u, v)))
                with tf1.variable_scope("ff"):
                    x = self.feed_forward(x)
        with tf1.variable_scope("adaptive_softmax"):
            return self.softmax(x, tables, projections), new_mems

    def embed(self) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor | None]]:
        """The scaled embeddings, and each band's table and projection."""
        case, size = self.case, self.case.d_model
        scale = size**0.5
        bands = list(pairwise(case.edges))
        if case.div_val == 1:
            table = self.variable("lookup_table", VOCAB, case.d_embed)
            projection = self.variable("proj_W", case.d_embed, size) if case.d_embed != size else None
            return (
                scale * _times(tf.gather(table, self.ids), projection),
                [table[low:high] for low, high in bands],
                [projection] * len(bands),
            )
        tables, projections, x = [], [], 0.0
        for i, (low, high) in enumerate(bands):
            width = case.d_embed // case.div_val**i
            with tf1.variable_scope(f"cutoff_{i}"):
                tables.append(self.variable("lookup_table", high - low, width))
                bare = width == size and not case.proj_same_dim
                projections.append(None if bare else self.variable("proj_W", width, size))
            inside = (self.ids >= low) & (self.ids < high)
            rows = _times(tf.gather(tables[i], tf.where(inside, self.ids - low, 0)), projections[i])
            x += tf.where(inside[..., None], rows, tf.zeros_like(rows))
        return scale * x, tables, projections

    def attend(self, x: tf.Tensor, past: tf.Tensor, u: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
        case = self.case
        queries, keys, heads = case.tgt_len, case.mem_len + case.tgt_len, (case.n_head, case.d_head)
        width = case.n_head * case.d_head
        qkv = self.dense("qkv", past, 3 * width)
        q, k, w = (tf.reshape(part, [keys, BATCH, *heads]) for part in tf.split(qkv, 3, -1))
        q = q[-queries:]
        r = tf.reshape(self.dense("r", self.encodings(keys), width), [keys, *heads])
        content = tf.einsum("ibnd,jbnd->ijbn", q + u, k)
        position = _shift(tf.einsum("ibnd,jnd->ijbn", q + v, r))
        hidden = self.hidden_keys()[:, :, None, None]
        score = (content + position) / case.d_head**0.5
        share = tf.nn.softmax(score * (1 - hidden) - 1e30 * hidden, axis=1)
        attended = tf.reshape(tf.einsum("ijbn,jbnd->ibnd", share, w), [queries, BATCH, width])
        return self.norm(x + self.dense("o", attended, case.d_model))

    def hidden_keys(self) -> tf.Tensor:
        """1 where query i must not see key j: the future, and under same_length the first i keys."""
        i, j = np.ogrid[: self.case.tgt_len, : self.case.mem_len + self.case.tgt_len]
        hidden = (j > i + self.case.mem_len) | (self.case.same_length & (j < i))
        return tf.constant(hidden, self.dtype)

    def encodings(self, length: int) -> tf.Tensor:
        distance = tf.range(length - 1, -1, -1.0, dtype=self.dtype)
        if self.case.clamp_len > 0:
            distance = tf.minimum(distance, self.case.clamp_len)
        size = self.case.d_model
        frequency = 1 / (10000 ** (tf.range(0, size, 2.0, dtype=self.dtype) / size))
        angle = distance[:, None] * frequency
        return tf.concat([tf.sin(angle), tf.cos(angle)], -1)

    def feed_forward(self, x: tf.Tensor) -> tf.Tensor:
        inner = tf.nn.relu(self.dense("layer_1", x, self.case.d_inner, bias=True))
        return self.norm(x + self.dense("layer_2", inner, self.case.d_model, bias=True))

    def dense(self, name: str, x: tf.Tensor, width: int, *, bias: bool = False) -> tf.Tensor:
        with tf1.variable_scope(name):
            y = tf.tensordot(x, self.variable("kernel", int(x.shape[-1]), width), 1)
            return y + self.variable("bias", width) if bias else y

    def norm(self, x: tf.Tensor) -> tf.Tensor:
        """tf.contrib.layers.layer_norm, which adds 1e-12 to the variance."""
        with tf1.variable_scope("LayerNorm"):
            beta, gamma = self.variable("beta", x.shape[-1]), self.variable("gamma", x.shape[-1], mean=1.0)
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        return tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-12)

    def softmax(self, x: tf.Tensor, tables: list[tf.Tensor], projections: list[tf.Tensor | None]) -> tf.Tensor:
        """Nats of each target: log p = head, or head[shortlist + i - 1] + tail of band i > 0."""
        case = self.case
        if not case.cutoffs:
            logits = _logits(x, tables[0], self.variable("bias", VOCAB), projections[0])
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=self.targets, logits=logits)
        parts: list[tf.Tensor] = []
        for i, (low, high) in enumerate(pairwise(case.edges)):
            with tf1.variable_scope(f"cutoff_{i}"):
                table, bias, projection = tables[i], self.variable("b", high - low), projections[i]
                if not case.ties(i):
                    width = int(table.shape[-1])
                    bare = width == case.d_model and (case.div_val == 1 or not case.proj_same_dim)
                    projection = None if bare else self.variable("proj", width, case.d_model)
                if i == 0:
                    table = tf.concat([table, self.variable("cluster_W", len(case.cutoffs), case.d_embed)], 0)
                    bias = tf.concat([bias, self.variable("cluster_b", len(case.cutoffs))], 0)
                scores = tf.nn.log_softmax(_logits(x, table, bias, projection))
            if i == 0:
                head, parts = scores, [scores[..., :high]]
            else:
                column = case.cutoffs[0] + i - 1
                parts.append(head[..., column : column + 1] + scores)
        return -tf.gather(tf.concat(parts, -1), self.targets, batch_dims=2)


def _times(x: tf.Tensor, projection: tf.Tensor | None) -> tf.Tensor:
    return x if projection is None else tf.tensordot(x, projection, 1)


def _logits(x: tf.Tensor, table: tf.Tensor, bias: tf.Tensor, projection: tf.Tensor | None) -> tf.Tensor:
    """A projection is [d_i, d_model] and used from right to left here."""
    y = x if projection is None else tf.einsum("ibd,ed->ibe", x, projection)
    return tf.einsum("ibd,nd->ibn", y, table) + bias


def _shift(x: tf.Tensor) -> tf.Tensor:
    """Column j of row i becomes that of distance M + i - j: a column in front, and the rows read one place later."""
    queries, keys, *rest = x.shape
    padded = tf.reshape(tf.pad(x, [[0, 0], [1, 0], [0, 0], [0, 0]]), [keys + 1, queries, *rest])
    return tf.reshape(padded[1:], [queries, keys, *rest])


def write_case(folder: Path, case: Case) -> None:
    """The files a user has, and expected.npz: losses, memories, and the last segment's gradients by variable."""
    folder.mkdir(parents=True)
    with tf.Graph().as_default(), tf1.Session() as session:
        graph = Graph(case)
        step = tf1.train.get_or_create_global_step()
        feed_step = step.assign(STEP - 1 if case.slots else STEP)
        train = tf1.train.AdamOptimizer(1e-2).apply_gradients(zip(graph.gradients, graph.variables, strict=True), step)
        session.run(tf1.global_variables_initializer())
        session.run(feed_step)
        ids, targets = graph.rng.integers(0, VOCAB, (2, SEGMENTS, case.tgt_len, BATCH))
        mems = np.zeros((case.n_layer, case.mem_len, BATCH, case.d_model), case.dtype)
        if case.slots:
            session.run(
                train, {graph.ids: ids[0], graph.targets: targets[0], **dict(zip(graph.mems, mems, strict=True))}
            )
        saved = None if case.slots else [*graph.variables, step]
        saver = tf1.train.Saver(saved, save_relative_paths=True)
        saver.save(session, str(folder / "model.ckpt"), global_step=STEP, write_meta_graph=False)
        losses, memories, gradients = [], [], []
        for segment in range(SEGMENTS):
            feed = dict(zip(graph.mems, mems, strict=True))
            feed |= {graph.ids: ids[segment], graph.targets: targets[segment]}
            nll, mems, gradients = session.run([graph.nll, graph.new_mems, graph.gradients], feed)
            losses.append(nll)
            memories.append(np.stack(mems))
    named = {f"gradient/{v.op.name}": g for v, g in zip(graph.variables, gradients, strict=True)}
    arrays = {"ids": ids, "targets": targets, "nll": np.stack(losses), "mems": np.stack(memories)}
    np.savez_compressed(folder / "expected.npz", **arrays, **named)
    cutoffs = case.edges if case.full_cutoffs else case.cutoffs
    (folder / "corpus-info.json").write_text(json.dumps({"vocab_size": VOCAB, "cutoffs": cutoffs}) + "\n")
    (folder / "hparams.json").write_text(json.dumps(case.flags(), indent=1) + "\n")
    if case.words:
        write_corpus(folder / "cache.pkl")


def write_corpus(path: Path) -> None:
    """A corpus as `data_utils.py` pickles it: an object of a class that the reader does not have."""
    symbols = ["<eos>", *(f"word{i}" for i in range(1, VOCAB - 1)), "naïve"]
    vocab = _instance(
        "vocabulary.Vocab",
        counter=Counter({symbol: 100 - i for i, symbol in enumerate(symbols)}),
        special=["<eos>"],
        min_freq=0,
        max_size=None,
        lower_case=False,
        delimiter=None,
        vocab_file=None,
        idx2sym=symbols,
        sym2idx=OrderedDict((symbol, i) for i, symbol in enumerate(symbols)),
    )
    splits = {
        name: np.arange(size, dtype=np.int64) % VOCAB for name, size in (("train", 97), ("valid", 13), ("test", 11))
    }
    corpus = _instance("data_utils.Corpus", dataset="wt103", vocab=vocab, cutoffs=[0, 11, 23, VOCAB], **splits)
    path.write_bytes(pickle.dumps(corpus, protocol=2))


def _instance(name: str, **attributes: object) -> object:
    module, _, kind = name.rpartition(".")
    made = sys.modules.setdefault(module, ModuleType(module))
    setattr(made, kind, type(kind, (), {"__module__": module}))
    instance = getattr(made, kind)()
    vars(instance).update(attributes)
    return instance


def write_bundles(path: Path) -> None:
    """Checkpoints of every form, in an archive, for their names repeat; with the values as arrays beside."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        expected = {f"types/{name}": value for name, value in save_types(folder / "types").items()}
        expected |= {f"shards/{name}": value for name, value in save_shards(folder / "shards").items()}
        expected |= {f"object/{name}": value for name, value in save_object(folder / "object").items()}
        save_names(folder / "names")
        spec = [f"5 3 {start},{size}:-" for start, size in ((0, 2), (2, 3))]
        _save(folder / "slices", ["whole", "whole"], [tf.ones([2, 3]), tf.ones([3, 3])], spec)
        np.savez_compressed(folder / "expected.npz", **expected)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for file in sorted(folder.iterdir()):
                if file.is_file() and file.name != "checkpoint":
                    archive.write(file, file.name)


def save_types(prefix: Path) -> dict[str, np.ndarray]:
    """A variable of each type, and of the shapes that are easily wrong."""
    kinds = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
    numbers = np.arange(-7, 8).reshape(3, 5)
    values = {
        kind: tf.cast(numbers % 2 if kind == "bool" else abs(numbers) if kind == "uint8" else numbers, kind)
        for kind in kinds
    }
    values |= {"scalar": tf.constant(-3.5), "empty": tf.zeros([0, 3]), "one": tf.ones([1, 1, 1], tf.int16)}
    others = {"complex": tf.constant(1j), "text": tf.constant(["a", "bc"]), "quarter": tf.constant(1, tf.uint32)}
    _save(prefix, [*values, *others], [*values.values(), *others.values()])
    return {name: _array(value) for name, value in values.items()}


def save_shards(prefix: Path) -> dict[str, np.ndarray]:
    """As a parameter server saves: one data file each, merged afterwards."""
    rng, values, parts = np.random.default_rng(1), {}, []
    for shard in range(3):
        mine = {
            f"shard_{shard}/{kind}": tf.constant(rng.normal(size=(shard + 2, 3)), kind)
            for kind in ("float64", "float32")
        }
        parts.append(f"{prefix}_{shard}")
        _save(Path(parts[-1]), [*mine], [*mine.values()])
        values |= mine
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=str(prefix), delete_old_dirs=False)
    return {name: _array(value) for name, value in values.items()}


def save_names(prefix: Path) -> None:
    """Names so long that they take several blocks (of 256 KiB), each with the number it begins with."""
    names = [f"{i:03d}{'/scope' * 150}" for i in range(700)]
    _save(prefix, names, [tf.constant(i) for i in range(len(names))])


def save_object(prefix: Path) -> dict[str, np.ndarray]:
    """As TensorFlow 2 saves, which adds a string."""
    weight = tf.Variable(tf.random.stateless_normal([3, 2], seed=(1, 2)))
    written = Path(tf.train.Checkpoint(weight=weight).write(str(prefix)))
    assert written == prefix, f"TensorFlow wrote {written}, not {prefix}"
    return {"weight/.ATTRIBUTES/VARIABLE_VALUE": _array(weight)}


def _save(prefix: Path, names: list[str], values: list[tf.Tensor], slices: list[str] | None = None) -> None:
    spec = slices or [""] * len(names)
    tf.raw_ops.SaveV2(prefix=str(prefix), tensor_names=names, shape_and_slices=spec, tensors=values)


def _array(value: tf.Tensor | tf.Variable) -> np.ndarray:
    """NumPy has no bfloat16, and float32 holds each of its numbers."""
    return (tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value).numpy()


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, case in GOLDEN.items():
        write_case(folder / name, case)
    write_bundles(folder / "bundles.zip")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
