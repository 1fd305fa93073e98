"""Training with torch.compile.

The compiler takes a minute. This file stands before `test_train.py`, whose tests keep the other workers busy meanwhile.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PATHS = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[1])])
COMPILED = """
import torch
from ranks import ALONE, CASES, findings, trainer_of

CASES["AR and TAR"] = {"n_layer": 1}, {"ar_alpha": 0.2, "tar_beta": 0.1}
found = [findings(trainer_of("AR and TAR", ALONE, compile=compiled)) for compiled in (True, False)]
torch.testing.assert_close(*found, rtol=1e-9, atol=1e-10)  # float64: sums in another order
"""


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
@pytest.mark.timeout(400)
def test_a_compiled_model_trains_as_one_that_is_not():
    """This runs in a separate process, without the type checker's import hook, which cannot be compiled."""
    environment = os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", COMPILED], check=True, env=environment)


GRAPHS = """
import torch._dynamo, torch._inductor.config
from functools import partial
from ranks import ALONE, CASES, findings, trainer_of

graphs, calls = 0, 0

def mode():
    flags = torch.utils.deterministic.fill_uninitialized_memory, torch._inductor.config.deterministic
    return torch.get_deterministic_debug_mode(), *flags

def counting(graph, inputs):
    global graphs
    graphs += 1
    assert case == ANY_LENGTH or not any(isinstance(x, torch.SymInt) for x in inputs), "code for any length is slower"
    def call(*arguments):
        global calls
        calls += 1
        assert mode() == (1, False, True), "or sums differ from process to process"
        return graph(*arguments)
    return call

torch.compile = partial(torch.compile, backend=counting)
one = {"n_layer": 1}
CASES |= {
    "AR, TAR, half loss": (one, {"ar_alpha": 0.2, "tar_beta": 0.1, "loss": "half"}),
    "n-grams and matches": (one | CASES["n-grams and matches"][0], {}),
}
ANY_LENGTH = "bands"  # their sizes differ in each step
for case, steps in {
    "AR, TAR, half loss": 4, "n-grams and matches": 4, "short at first": 6, "lstm": 2, ANY_LENGTH: 9
}.items():
    torch.compiler.reset()
    graphs = calls = 0
    found = [findings(trainer_of(case, ALONE, compile=compiled), steps) for compiled in (True, False)]
    torch.testing.assert_close(*found)
    assert mode() == (0, True, False)
    print(graphs, calls)
torch.compiler.reset()
graphs, calls, case = 0, 0, "plain"
findings(trainer_of(case, ALONE, compile=True, dropout=0.2))
print(graphs, calls)
"""


@pytest.mark.outside
@pytest.mark.timeout(400)
def test_every_kind_of_training_compiles_with_the_same_result():
    """The counting backend runs graphs unchanged, so results are equal up to the order of sums."""
    done = subprocess.run(
        [sys.executable, "-c", GRAPHS], env=os.environ | {"PYTHONPATH": PATHS}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    counts = [[int(number) for number in line.split()] for line in done.stdout.splitlines()]
    assert counts[0] == [1, 2], "only steps with a full memory are compiled, which the first two have not"
    assert counts[1] == [7, 14], "the lookup of n-grams, which is not compiled, splits a graph into seven"
    assert counts[2] == [2, 2], "one graph for each pair of lengths, of no other"
    assert counts[3][1] > 0, "a recurrent state is never short"
    assert counts[4][0] <= 15, "the compiler makes code for bands of any size, once"
    assert counts[5] == [1, 2], "dropout splits a graph"
