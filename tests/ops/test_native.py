"""The kernels in C++: the contract on blocks of all sizes, dropout, repeatability, and what is said without them.

They are built once for each machine, in its folder of temporary files.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from transformer_xl.ops import choice, native, relative_attention, resolve_backend
from transformer_xl.ops.choice import native_refusal
from transformer_xl.ops.testing import CASES, Case, assert_contract, assert_dropout, make_inputs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CPU = torch.device("cpu")
LONG: dict[str, Any] = {"training": True, "scores": choice.STRIDED_SCORES + 1, "queries": 512}
"""Training in which the kernels are faster in fp32."""

# Several chunks of queries and panels of keys, the last ones not full.
CASES = CASES | {
    "several panels": Case(queries=131, memory=421, batch=2, heads=2, head_size=32, strided=True),
    "several panels, all masks": Case(193, 331, attn_len=277, valid=(331, 13, -83), heads=1, head_size=41),
    "several panels, both directions": Case(167, 131, causal=False, valid=(131, -43), end=(167, 149), batch=2, heads=1),
    "several panels, look-ahead": Case(149, 173, causal=False, look_ahead=29, attn_len=83, batch=1, heads=2),
    "many heads and rows": Case(queries=5, memory=3, heads=19, batch=7, valid=(3, 0, 1, -2, 3, -5, 2)),
}


pytestmark = pytest.mark.usefixtures("without_build")


def skip_without(dtype: torch.dtype) -> None:
    if reason := native.machine_refusal(dtype):
        pytest.skip(reason)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache on a machine that can run the kernels."""
    if reason := native.machine_refusal():
        pytest.skip(f"the kernels do not run here: {reason}")
    monkeypatch.setenv("TXL_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.skipif(os.name == "nt", reason="rights of POSIX")
def test_a_build_that_others_could_have_written_is_not_run(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "kernels.so"
    file.parent.mkdir()
    file.touch()
    for rights_of_file, rights_of_folder in ((0o644, 0o755), (0o664, 0o755), (0o646, 0o755), (0o644, 0o775)):
        file.chmod(rights_of_file)
        file.parent.chmod(rights_of_folder)
        trusted = (rights_of_file | rights_of_folder) & 0o022 == 0
        assert (native._doubt(file) is None) == trusted
    assert f"others may write {file.parent}" in str(native._doubt(file))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backward", [True, False], ids=["backward", "forward"])
@pytest.mark.parametrize("case", CASES)
def test_contract(case: str, backward: bool, dtype: str, built: Path) -> None:
    skip_without(DTYPES[dtype])
    assert_contract("native", CASES[case], DTYPES[dtype], backward=backward)


@pytest.mark.parametrize("both", [False, True], ids=["causal", "both directions"])
def test_dropout(both: bool, built: Path) -> None:
    case = Case(queries=71, memory=57, attn_len=119, valid=(57, -2), batch=2, head_size=128)
    case = replace(case, causal=False, look_ahead=9, end=(71, 53)) if both else case
    assert_dropout("native", case, torch.float32)
    inputs = make_inputs(case, torch.float32)
    with torch.device("meta"):  # the default device of a process
        assert relative_attention(**inputs, dropout_p=0.5, backend="native").isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_run_repeats_with_several_threads(dtype: torch.dtype, built: Path) -> None:
    skip_without(dtype)
    case = Case(queries=97, memory=61, batch=5, heads=3, head_size=32)
    inputs = make_inputs(case, dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        runs = []
        for _ in range(4):
            out = relative_attention(**inputs, backend="native")
            runs.append([out, *torch.autograd.grad(out.sum(), list(inputs.values()))])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(run, runs[0], strict=True))
    none = {name: x[:0] if name in "qkv" else x for name, x in inputs.items()}
    assert relative_attention(**none, backend="native").shape == (0, 3, 97, 32)


def test_a_number_that_is_not_finite_shows(built: Path) -> None:
    for name in "qkv":
        inputs = {n: x.detach() for n, x in make_inputs(Case(), torch.float32).items()}
        inputs[name][0, 0, 3, 1] = float("nan")
        out = relative_attention(**inputs, backend="native")
        reference = relative_attention(**inputs, backend="reference")
        assert torch.equal(out.isnan(), reference.isnan()), name


def test_memory_is_linear_in_length(built: Path) -> None:
    """Backward keeps the inputs, the result and a number per query."""
    kept = []
    for length in (256, 512):
        inputs = make_inputs(Case(length, length, batch=1, heads=2, head_size=32), torch.float32)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, s=sizes: s.append(x.nbytes) or x, lambda x: x):
            relative_attention(**inputs, backend="native")
        kept.append(sum(sizes))
    assert kept[1] <= 2 * kept[0]


@pytest.mark.parametrize(
    ("dtype", "processor", "training", "many", "queries", "head_size", "wins"),
    [
        ("fp32", "other", False, False, 128, 64, True),
        ("fp32", "other", False, False, 127, 64, False),
        ("fp32", "other", False, False, 128, 41, False),
        ("fp32", "other", True, True, 512, 64, True),
        ("fp32", "other", True, True, 256, 64, False),
        ("fp32", "other", True, False, 512, 64, False),
        ("bf16", "AMX", False, False, 16, 41, True),
        ("bf16", "AMX", False, False, 15, 41, False),
        ("bf16", "AMX", True, False, 128, 64, True),
        ("bf16", "AMX", True, False, 128, 41, False),
        ("bf16", "AMX", True, True, 64, 41, True),
        ("bf16", "other", True, False, 512, 64, True),
        ("bf16", "other", True, False, 128, 64, False),
        ("bf16", "other", True, True, 64, 64, True),
        ("bf16", "other", True, True, 64, 41, False),
        ("bf16", "other", True, True, 63, 64, False),
    ],
)
def test_auto_takes_it_where_it_was_measured_to_be_faster(
    dtype, processor, training, many, queries, head_size, wins, monkeypatch
) -> None:
    """The table of docs/op.md, on any machine."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: processor == "AMX")
    monkeypatch.setattr(choice, "native_refusal", lambda device, dtype: None)
    call = {"training": training, "scores": choice.STRIDED_SCORES + many, "queries": queries}
    assert (resolve_backend("auto", CPU, DTYPES[dtype], head_size, **call)[0] == "native") == wins


@pytest.mark.skipif(hasattr(relative_attention, "__wrapped__"), reason="checks of shapes cannot be compiled")
@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_a_compiled_call_takes_the_kernels_too(dropout_p: float, built: Path) -> None:
    x = make_inputs(Case(queries=128, memory=57, batch=2, head_size=32), torch.float32)
    compiled: Callable[..., torch.Tensor] = torch.compile(relative_attention, backend="aot_eager", fullgraph=True)
    found = []
    for attend in (compiled, relative_attention):
        torch.manual_seed(5)
        out = attend(**x, dropout_p=dropout_p, backend="native")
        with torch.no_grad():
            chosen = attend(**x)
        found.append([out, chosen, *torch.autograd.grad(out.square().sum(), list(x.values()))])
    assert all(map(torch.equal, *found))


def test_the_compiler_knows_the_results_of_the_kernels(built: Path) -> None:
    tensors = [*make_inputs(Case(queries=5, memory=9, heads=3, head_size=7), torch.float32).values(), None, None, None]
    tensors = [x if x is None else x.detach() for x in tensors]
    operators, numbers = native.kernels(), (14, 0, 0.5, 0.0)
    out, lse = operators.forward(*tensors, *numbers)
    for operator, given in ((operators.forward, ()), (operators.backward, (out, out, lse))):
        torch.library.opcheck(operator.default, (*given, *tensors, *numbers))


@pytest.mark.parametrize(
    ("dtype", "device", "said"),
    [("float64", "cpu", "float64"), ("float16", "cpu", "float16"), ("float32", "meta", "meta")],
)
def test_what_it_cannot_serve_is_refused(dtype: str, device: str, said: str) -> None:
    inputs = {n: x.to(device, getattr(torch, dtype)) for n, x in make_inputs(Case(), torch.float64).items()}
    with pytest.raises(ValueError, match=rf"(?s)native.*{said}.*auto"):
        relative_attention(**inputs, backend="native")


def test_without_a_build_a_call_says_so_and_never_compiles(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled"))
    x = make_inputs(Case(queries=512, memory=512, heads=3, head_size=32, batch=3), torch.float32)
    with pytest.raises(ValueError, match=r"not built.*txl generate"):
        relative_attention(**x, backend="native")
    assert torch.equal(relative_attention(**x), relative_attention(**x, backend="chunked"))
    name, why = resolve_backend("auto", CPU, torch.float32, 64, **LONG)
    assert name == "chunked" and "not built" in why
    monkeypatch.setenv("PATH", "")
    lines: list[str] = []
    native.build(lines.append)
    assert len(lines) == 1 and "g++" in lines[0]
    monkeypatch.setenv("TXL_NATIVE", "0")
    assert "TXL_NATIVE" in str(native_refusal(CPU, torch.float32))
    native.build(pytest.fail)


def test_what_another_process_built_is_used(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXL_HOME", str(tmp_path))
    native.library.cache_clear()
    assert "not built" in str(native_refusal(CPU, torch.float32))
    native.library().parent.mkdir(mode=0o755)
    shutil.copy(built, native.library())
    native.build(pytest.fail)
    assert native_refusal(CPU, torch.float32) is None


def test_a_failed_build_is_said_in_a_line(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = elsewhere / "attention.cpp"
    broken.write_text("this is no C++\n")
    monkeypatch.setattr(native, "SOURCES", (broken,))
    if native.compiler() is None:
        pytest.skip("no C++ compiler")
    lines: list[str] = []
    native.build(lines.append)
    assert len(lines) == 2 and "error" in lines[1] and "slower" in lines[1]
    [note] = native.library().parent.iterdir()
    assert "error" in note.read_text()
    assert f"{note} says why" in str(native_refusal(CPU, torch.float32))
    native.build(lines.append)
    assert len(lines) == 3 and str(note) in lines[2], "a build that failed is tried again"


def test_without_a_folder_to_write_nothing_is_built(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.compiler() is None:
        pytest.skip("no C++ compiler")
    (elsewhere / "file").touch()
    monkeypatch.setenv("TXL_HOME", str(elsewhere / "file"))
    lines: list[str] = []
    native.build(lines.append)
    assert len(lines) == 1 and "cannot be written. Set TXL_HOME" in lines[0]


def test_a_build_gets_its_name_when_the_disk_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, path = [], tmp_path / "native" / "kernels.so"

    def compiled(command: list[str], **_: Any) -> None:
        Path(command[command.index("-o") + 1]).write_bytes(b"a library")

    monkeypatch.setattr(native, "_flags", tuple)  # any processor
    monkeypatch.setattr(subprocess, "run", compiled)
    monkeypatch.setattr(os, "fsync", lambda file: synced.append((os.fstat(file).st_size, path.exists())))
    path.parent.mkdir()
    native._compile("c++", path)
    assert synced == [(9, False)] and path.read_bytes() == b"a library"


def test_a_build_that_cannot_be_loaded_is_not_used(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-DOTHER"))  # a name that this process has not loaded
    native.library().parent.mkdir(mode=0o755)
    foreign = Path(torch.__file__).with_name("lib") / "libtorch_global_deps.so"
    for content, said in ((b"no library", r"loaded \(.*: file too short\)"), (foreign.read_bytes(), "another program")):
        native.library().write_bytes(content)
        native.library().chmod(0o644)
        native._load.cache_clear()
        name, why = resolve_backend("auto", CPU, torch.float32, 64, **LONG)
        assert name == "chunked" and re.search(said, why)


def test_a_change_of_source_or_version_needs_another_build(elsewhere, tmp_path, monkeypatch) -> None:
    names = {native.library()}
    flags = tmp_path / "cpuinfo"
    flags.write_text("flags : avx512f\n")
    changes: list[tuple[Any, str, Any]] = [(torch, "__version__", "9.9"), (native, "CPUINFO", flags)]
    for number, source in enumerate(native.SOURCES):
        changed = tmp_path / source.name
        changed.write_text(source.read_text() + "\n")
        changes.append((native, "SOURCES", (*native.SOURCES[:number], changed, *native.SOURCES[number + 1 :])))
    for owner, name, value in changes:
        monkeypatch.setattr(owner, name, value)
        native.library.cache_clear()
        names.add(native.library())
    assert len(names) == 1 + len(changes)


def test_two_copies_in_one_process(built: Path, tmp_path: Path) -> None:
    """An exported folder or a second version of the package may load the same file again, or one of another cache."""
    for file in (built, built, Path(shutil.copy(built, tmp_path))):
        assert native._load.__wrapped__(file) is None and native.kernels().forward


@pytest.mark.outside
@pytest.mark.timeout(580)
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="other tests see narrower registers")
def test_a_processor_with_avx2_alone() -> None:
    """The tests of these kernels and of the step again, in a process whose kernels are those for AVX2."""
    narrow = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    files = Path(__file__), Path(__file__).parents[1] / "model" / "test_step.py"
    command = [sys.executable, "-m", "pytest", "-qx", "-n", "0", "-p", "no:cacheprovider", "-m", "not outside"]
    result = subprocess.run([*command, *files], env=os.environ | narrow, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]
    assert "AVX512-BF16 or AMX" in result.stdout, "wider kernels were tested"
