"""What other systems lack is asked for before it is used. (Only Linux was run.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WITHOUT = """
import os, pkgutil, signal, sys
import torch, numpy, filelock, pooch  # the libraries may use what the system has
try:
    import uvicorn, fastapi, h11
except ImportError:
    pass
for name in ("resource", "fcntl", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("sysconf", "register_at_fork", "fork", "killpg", "getuid"):
    if hasattr(os, name):
        delattr(os, name)
del signal.SIGHUP
sys.platform = "win32"
import transformer_xl
from transformer_xl.mistake import Mistake
for module in pkgutil.walk_packages(transformer_xl.__path__, "transformer_xl.", onerror=print):
    if "__main__" not in module.name and ".native." not in module.name:
        try:
            __import__(module.name)
        except (ImportError, Mistake) as error:  # of an optional library
            assert "resource" not in str(error) and "fcntl" not in str(error), f"{module.name}: {error}"
from transformer_xl.commands.main import main
from transformer_xl.runtime.device import prepare_process
prepare_process()
line = "train text-small --data text.txt --model.n-layer 1 --model.d-model 8 --model.n-head 2 --model.d-head 3"
line += " --model.d-inner 5 --train.max-steps 2 --train.tgt-len 8 --train.mem-len 8 --train.batch-size 2 --out run"
assert main([*line.split(), "--no-report", "--model.ngrams=", "--model.matches="]) == 0
assert main("eval run".split()) == 0 and main("generate run --prompt a --max-tokens 3".split()) == 0
try:
    from transformer_xl.serving import server
except (ImportError, Mistake):
    pass
else:
    import ctypes
    ctypes.CDLL = None  # on Windows its argument must be a name
    from types import SimpleNamespace
    assert server.make_server(SimpleNamespace(state=SimpleNamespace(service=None)))
"""


def test_a_run_trains_without_what_windows_or_macos_lacks(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 400)
    environment = os.environ | {"TXL_HOME": str(tmp_path / "home")}
    code = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(code, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
