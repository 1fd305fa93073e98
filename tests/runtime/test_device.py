"""What makes a CPU fast: bf16 only where it is faster than fp32, and no numbers below the normal ones."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch

from transformer_xl.runtime import device


@pytest.mark.parametrize(
    ("amx", "avx512", "vendor", "precision"),
    [
        (True, True, "GenuineIntel", "bf16"),
        (False, True, "GenuineIntel", "fp32"),
        (False, True, "AuthenticAMD", "bf16"),
        (False, False, "AuthenticAMD", "fp32"),
        (False, True, None, "bf16"),
    ],
)
def test_auto_takes_bf16_where_the_processor_gains_from_it(tmp_path, monkeypatch, amx, avx512, vendor, precision):
    cpuinfo = tmp_path / "cpuinfo"
    if vendor is not None:  # None: not Linux
        cpuinfo.write_text(f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(device, "CPUINFO", cpuinfo)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    assert device.resolve_precision("auto", torch.device("cpu"))[0] == precision


def test_auto_takes_the_half_precision_of_the_card(monkeypatch):
    """Of the one that is asked for, which need not be PyTorch's current device."""
    cards = {"cuda:0": (8, 0), "cuda:1": (7, 5), "cuda:2": (6, 1), "cuda": (8, 0)}
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda card: cards[str(card)])
    found = [device.resolve_precision("auto", torch.device(card))[0] for card in cards]
    assert found == ["bf16", "fp16", "fp32", "bf16"]


@pytest.mark.unchecked
def test_only_cuda_is_not_waited_for_in_a_copy_from_the_host():
    """Apple's GPU would read the host's memory after it is free."""
    for kind in ("cuda", "mps", "cpu"):
        host = Mock()
        copy, chosen = device.on_device(host, torch.device(kind)), torch.device(kind)
        if kind == "cuda":
            assert copy is host.pin_memory().to.return_value
            host.pin_memory().to.assert_called_once_with(chosen, non_blocking=True)
        else:
            host.to.assert_called_once_with(chosen)


def test_the_smallest_numbers_become_zero_in_all_threads_and_numpy_does_not_warn_of_it():
    """In a process of its own, because threads take this over from the thread that starts them. NumPy before 2 warns
    where matplotlib asks for the smallest number."""
    code = (
        "import numpy; from transformer_xl.runtime.device import prepare_process; prepare_process(); import torch; "
        "print(int((torch.full((10**6,), 1e-30) * 1e-10).count_nonzero())); "
        "str(numpy.finfo(numpy.float64)), numpy.finfo(numpy.float32).smallest_subnormal"
    )
    command, threads = [sys.executable, "-W", "error", "-c", code], os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, env=threads, capture_output=True, text=True, timeout=60)
    flushes = torch.set_flush_denormal(True)  # False on a processor that cannot
    assert (done.returncode, done.stdout) == (0, "0\n" if flushes else "1000000\n"), done.stderr


def test_a_child_that_is_forked_after_arithmetic_can_compute():
    """OpenMP's threads stay in the parent."""
    code = (
        "import os, torch, transformer_xl.runtime.device; torch.set_num_threads(2); x = torch.randn(800, 800); x @ x\n"
        "if child := os.fork(): os._exit(os.waitpid(child, 0)[1])\n"
        "x @ x; os._exit(0)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
