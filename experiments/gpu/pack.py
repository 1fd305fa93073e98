"""Make the folder that a machine without a network needs for the sittings: at most 64 MiB with the repository.

    python -m experiments.gpu.pack .gpu --python BARE/bin/python --enwik8 enwik8.xz

On that machine, from the root of the repository:

    . .gpu/setup.sh && python3 -m experiments.gpu.first --out OUT

BARE is an environment like the machine's: its versions of Python, torch and triton. The kernels are compiled there,
without a GPU, and the machine uses them if its triton is the same. `.gpu` must be ignored by git.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = Path("/tmp/txl-triton")
"""The cache of kernels holds absolute paths, so it has one place on all machines."""
PACKAGES = "tyro", "platformdirs", "docstring_parser", "typeguard"
SETUP = f"""\
export TXL_CARRIED="$PWD/{{folder}}" TRITON_CACHE_DIR={CACHE} PYTHONPATH=/tmp/txl-site PYTHONUNBUFFERED=1
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target /tmp/txl-site \\
    "$TXL_CARRIED"/wheels/*.whl && cp -r "$TXL_CARRIED"/*.dist-info /tmp/txl-site &&
tar xJf "$TXL_CARRIED/triton.tar.xz" -C /
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", required=True, help="the Python of an environment like the machine's")
    parser.add_argument("--enwik8", type=Path, help="enwik8, for the second sitting")
    options = parser.parse_args()
    folder: Path = options.folder
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "wheels").mkdir(parents=True)
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith(PACKAGES)]
    platforms = [word for name in ("2_28", "2_17") for word in ("--platform", f"manylinux_{name}_x86_64")]
    platforms += ["--platform", "manylinux2014_x86_64", "--python-version", "3.12", "--only-binary=:all:", "--no-deps"]
    download = [sys.executable, "-m", "pip", "download", "-q", *platforms, "-d", folder / "wheels", *pins]
    subprocess.run(download, check=True)
    about = folder / "transformer_xl-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-xl\nVersion: 0.1.0\n")
    if options.enwik8:
        shutil.copyfile(options.enwik8, folder / options.enwik8.name)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    (folder / "commit").write_text(commit.stdout)
    (folder / "setup.sh").write_text(SETUP.format(folder=folder.name))
    shutil.rmtree(CACHE, ignore_errors=True)
    compile_kernels = [options.python, "-m", "experiments.gpu.compile_kernels", str(CACHE)]
    paths = {"PYTHONPATH": ":".join([str(ROOT), *map(str, (folder / "wheels").resolve().glob("*.whl"))])}
    subprocess.run(
        compile_kernels, cwd=ROOT, env=paths | {"PATH": "/usr/bin:/bin", "HOME": str(Path.home())}, check=True
    )
    archive = (folder / "triton.tar.xz").resolve()
    subprocess.run(["tar", "cJf", archive, "-C", "/", CACHE.relative_to("/")], check=True)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
