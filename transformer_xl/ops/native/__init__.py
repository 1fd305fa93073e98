"""A CPU with AVX2 or AVX-512: attention in C++, in blocks that stay in the cache, and reading one token.

`attention.cpp` and `step.cpp` have the kernels, in one library, without Python. The commands of `txl` build it once for
each machine and version of torch (`build`); a call never compiles, it only uses what is built. The step is described in
its file and in `model/kernels.py`.

Attention uses oneDNN's products, which use AMX if the processor has it and sum in float32. The softmax is computed
online and keeps the logarithm of its sum, from which backward computes the probabilities again. Nothing is added in
the order of threads, so a run repeats bit by bit. Dropout's masks are a function of (seed, row, head, query, key).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..call import Call, constant, first_derivative
from ..choice import cache_folder

DTYPES = torch.float32, torch.bfloat16
SOURCES = tuple(map(Path(__file__).with_name, ("attention.cpp", "step.cpp", "common.h", "numbers.h")))
COMPILERS = "c++", "g++", "clang++"
# PyTorch 2.14 needs C++20, which older compilers know as C++2a.
FLAGS = "-std=c++2a", "-O3", "-march=native", "-fopenmp", "-fPIC", "-w"
WIDTHS = {"AVX512": "-mprefer-vector-width=512", "AVX2": "-mno-avx512f"}
"""The registers of PyTorch's own kernels (ATEN_CPU_CAPABILITY) that these can use, too."""
CPUINFO = Path("/proc/cpuinfo")
_BUILD = "txl generate or transformer_xl.ops.native.build(print)"


def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot serve a call; None if they can."""
    if device.type != "cpu":
        return f"it runs on a CPU, got {device}"
    if dtype not in DTYPES:
        return f"it takes fp32 and bf16, got {str(dtype).removeprefix('torch.')}"
    return machine_refusal(dtype) or _load(library())


def machine_refusal(dtype: torch.dtype = torch.float32) -> str | None:
    """Why this machine cannot run the kernels, built or not; None if it can."""
    if os.environ.get("TXL_NATIVE") == "0":
        return "TXL_NATIVE=0 switches it off"
    width = torch.backends.cpu.get_cpu_capability()
    if sys.platform != "linux" or width not in WIDTHS:
        return "it needs Linux and a processor with AVX2"
    if dtype == torch.bfloat16 and not (width == "AVX512" and torch.cpu._is_avx512_bf16_supported()):
        return "in bf16 it needs a processor with AVX512-BF16 or AMX"
    return None if torch.backends.mkldnn.enabled else "it needs oneDNN, and torch.backends.mkldnn.enabled is False"


@cache
def library() -> Path:
    """The file of the built kernels: its name changes with the source, the versions and the processor."""
    processor = {line for line in CPUINFO.read_text().splitlines() if line.startswith("flags")}
    sources = (source.read_text() for source in SOURCES)
    parts = *sources, torch.__version__, *_flags(), *sorted(processor)
    key = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]
    return cache_folder() / "native" / f"txl_native_{key}.so"


def _flags() -> tuple[str, ...]:
    width = torch.backends.cpu.get_cpu_capability()
    return *FLAGS, WIDTHS[width], f"-DCPU_CAPABILITY_{width}", f"-DCPU_CAPABILITY={width}"


@cache
def _load(path: Path) -> str | None:
    """Load the kernels. Return why they cannot be used; None if they can."""
    if not path.exists():
        return f"it is not built for this machine; {_advice(path)}"
    if reason := _doubt(path):
        return reason
    operators = getattr(torch.ops, path.stem)
    if hasattr(operators, "forward"):  # loaded from another folder; to register the names again would end the process
        return None
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"its build {path} cannot be loaded ({error.__cause__}); {_advice(path)} again"
    if not hasattr(operators, "forward"):
        return f"{path} is of another program; remove it, then {_advice(path)}"
    torch.library.register_fake(f"{path.stem}::forward", _empty_results)
    torch.library.register_fake(f"{path.stem}::backward", _empty_gradients)
    return None


def _advice(path: Path) -> str:
    """How to get a build. After one that failed, no command tries again while its reason is there."""
    failure = path.with_suffix(".txt")
    return (f"{failure} says why a build failed: remove it, then " if failure.exists() else "") + f"{_BUILD} builds it"


def _doubt(path: Path) -> str | None:
    """Why a file must not run: someone else could have written it. None if nobody could."""
    for each in (path, path.parent):
        found = each.stat()
        if found.st_uid not in (os.getuid(), 0) or found.st_mode & 0o022:
            return f"others may write {each}; remove it, or take these rights away"
    return None


@constant  # torch.compile would stop at the file
def _name() -> str:
    return library().stem


def kernels() -> Any:
    """The operators `forward` and `backward` of `attention.cpp`, after `refusal` was None."""
    return getattr(torch.ops, _name())


def step_of(*model: object) -> Any:
    """A `Step` of `step.cpp`, after `refusal` was None; for the arguments see there."""
    return getattr(torch.classes, library().stem).Step(*model)


def build(say: Callable[[str], None]) -> None:
    """Build the kernels, unless they are there or this machine cannot use them.

    `say` gets a line before a build, and one if it fails. After a failure the other backends serve, and the reason
    stays beside `library()`, so no later command tries again.
    """
    if machine_refusal() is not None:
        return
    _load.cache_clear()  # another process may have built them
    if _load(library()) is None:
        return
    command, failure = compiler(), library().with_suffix(".txt")
    if command is None:
        say("The kernels for this CPU were not built, because there is no C++ compiler. To be faster, install g++.")
        return
    if failure.exists():
        say(f"PyTorch's slower kernels serve, because a build failed. {failure} says why; remove it to try again.")
        return
    with suppress(OSError):
        failure.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(failure.parent, os.W_OK):
        say(f"The kernels were not built, because {failure.parent} cannot be written. Set TXL_HOME to another folder.")
        return
    say("Building the kernels for this CPU, once, in less than a minute (TXL_NATIVE=0: never).")
    try:
        _compile(command, library())
        _load.cache_clear()
        reason = _load(library())
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
    if reason:
        line = next((line for line in reason.splitlines() if "error" in line), reason)
        say(f"The kernels could not be built, so PyTorch's slower ones serve: {line[:300]}")
        with suppress(OSError):
            failure.write_text(reason)
        _load.cache_clear()


def compiler() -> str | None:
    """The C++ compiler to build with, if there is one."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def finds(header: str, folder: str) -> bool:
    """Whether there is a C++ compiler that finds a header in `folder`, or where it looks anyway (CPATH)."""
    command, flags = compiler(), ("-fsyntax-only", "-I", folder, "-include", header, "-x", "c++", os.devnull)
    return command is not None and subprocess.run([command, *flags], capture_output=True).returncode == 0


def _compile(compiler: str, path: Path) -> None:
    torch_folder = Path(torch.__file__).parent  # `cpp_extension` has these paths, and warns of a lack of CUDA
    path.parent.chmod(0o755)  # see `_doubt`; with some umasks a group may write
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, ThreadPoolExecutor() as pool:
        built = Path(folder, path.name)
        flags = *_flags(), f"-I{torch_folder / 'include'}", f"-DLIBRARY_NAME={path.stem}"
        links = f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"
        run = partial(subprocess.run, check=True, capture_output=True, text=True)
        units = {source: f"{folder}/{source.stem}.o" for source in SOURCES if source.suffix == ".cpp"}
        commands = ([compiler, *flags, "-c", str(unit), "-o", units[unit]] for unit in units)
        list(pool.map(run, commands))
        run([compiler, "-shared", *_flags(), *units.values(), "-o", str(built), *links])
        built.chmod(0o755)
        with built.open("rb+") as file:  # a library that a power failure cut short ends every process that loads it
            os.fsync(file.fileno())
        built.replace(path)


class _NativeAttention(torch.autograd.Function):
    """The kernels as an autograd function. First derivatives only."""

    @staticmethod
    def forward(ctx, *arguments):
        out, lse = kernels().forward(*arguments)
        ctx.save_for_backward(out, lse, *arguments[:9])
        ctx.options = arguments[9:]
        return out

    @staticmethod
    @first_derivative
    def backward(ctx, d_out: Tensor):
        d_q, d_k, d_v, d_r, d_biases = kernels().backward(d_out, *ctx.saved_tensors, *ctx.options)
        return d_q, d_k, d_v, d_r.mT, *d_biases.unbind(1), *[None] * 7


def _empty_results(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """What the compiler takes as results of `forward`: the output and the logarithms of the softmax's sums."""
    B, H, T, K = q.shape
    return q.new_empty(B, T, H, K).transpose(1, 2), q.new_empty(B, H, T, dtype=torch.float32)


def _empty_gradients(
    d_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, r: Tensor, *_: object
) -> tuple[Tensor, ...]:
    """What the compiler takes as results of `backward`."""
    H, R, K = r.shape
    heads = (_empty_results(x)[0] for x in (q, k, v))
    return *heads, r.new_empty(H, K, R), r.new_empty(H, 2, K)


def attend(call: Call) -> Float[Tensor, "B H T K"]:
    """See `relative_attention`."""
    q, k, v, r, content_bias, position_bias, mask, dropout_p, scale = call
    S = k.shape[2]
    r = r[:, r.shape[1] - S - mask.ahead :]
    first, until = (each if each is None else each.long().expand(-1, q.shape[2]) for each in (mask.first, mask.until))
    seed = torch.randint(1 << 62, (), device="cpu") if dropout_p else None
    numbers = mask.window(S), mask.ahead, scale, dropout_p
    return _NativeAttention.apply(q, k, v, r, content_bias, position_bias, first, until, seed, *numbers)
