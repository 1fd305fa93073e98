"""The precision that "auto" chooses: bf16 only on a processor on which it is faster than fp32."""

from __future__ import annotations

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
