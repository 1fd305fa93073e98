"""Continue a text with a model exported to ONNX: NumPy and onnxruntime, without torch and without this package.

txl convert runs/mine --to-format onnx --to onnx/mine
pip install numpy onnxruntime
python examples/stream_onnx.py onnx/mine "The "
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import onnxruntime

LENGTH = 500


def stream(folder: str, prompt: str) -> None:
    session = onnxruntime.InferenceSession(Path(folder) / "model.onnx")
    about = session.get_modelmeta().custom_metadata_map
    vocabulary = json.loads(Path(folder, "vocab.json").read_text(encoding="utf-8"))
    symbols = vocabulary["symbols"]
    if vocabulary["unit"] != "byte" or not prompt or not set(os.fsencode(prompt)) <= set(symbols):
        sys.exit("This example is for a model of bytes, and a prompt of bytes that the model knows.")
    # The state before the text: no keys and values, no positions that count, and -1 for tokens that are not there.
    empty = {"memory": (np.float32, 0), "valid": (np.int64, 0), "tokens": (np.int64, -1)}
    sizes = {"rows": 1, "past": 0}
    names = [each.name for each in session.get_inputs()]
    shapes = [[sizes.get(size, size) for size in each.shape] for each in session.get_inputs()[1:]]
    state = [np.full(shape, empty[name][1], empty[name][0]) for name, shape in zip(names[1:], shapes, strict=True)]
    random, ids = np.random.default_rng(0), np.array([[symbols.index(byte) for byte in os.fsencode(prompt)]])
    for at in range(0, ids.shape[1], int(about["tgt_len"])):
        segment = ids[:, at : at + int(about["tgt_len"])]
        log_probs, *state = session.run(None, dict(zip(names, [segment, *state], strict=True)))
    for _ in range(LENGTH):
        probability = np.exp(log_probs[0, -1].astype(np.float64))
        token = random.choice(len(probability), p=probability / probability.sum())
        sys.stdout.buffer.write(bytes([symbols[token]]))
        sys.stdout.flush()
        log_probs, *state = session.run(None, dict(zip(names, [np.array([[token]]), *state], strict=True)))


if __name__ == "__main__":
    stream(*sys.argv[1:]) if len(sys.argv) == 3 else sys.exit(__doc__)
