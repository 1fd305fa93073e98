"""The third sitting: how fast are the peers on the same card? 420 seconds.

    python3 -m experiments.gpu.third --out OUT

`setup.sh` makes the peers' Python and names it in TXL_PEERS, if the folder has them (`pack --peers`).
"""

from __future__ import annotations

import os

from .sitting import Sitting, contract, machine

S = Sitting.from_command_line(420)
PAIR = ("--device", str(S.device), "--precision", "bf16", *(("--size", "toy") if S.toy else ()))


def race(*words: str, least: float, repeats: int = 3) -> None:
    """`python -m benchmarks`; its tables and its line of JSON are in the log."""
    name = "-".join(word.removeprefix("--") for word in words if not word.startswith("/"))
    S.part(" ".join(words), least)(
        lambda: S.run(
            "-m",
            "benchmarks",
            *words,
            *PAIR,
            "--repeats",
            str(1 if S.toy else repeats),
            log=f"{name}.log",
            seconds=S.left,
        )[-2500:]
    )


peers = ("--peers", os.environ["TXL_PEERS"]) if "TXL_PEERS" in os.environ else ()
S.part("machine", 5)(lambda: machine(S))
S.part("the contract", 20)(lambda: contract(S))
race("train", "--batch-size", "2" if S.toy else "22", *peers, least=60)
race("op", "--batch-size", "2" if S.toy else "22", "--tgt-len", "16" if S.toy else "512", least=200)
race("decode", *peers, least=40)
race("eval", *peers, least=40)
race("sliding", repeats=1, least=60)
S.finish()
