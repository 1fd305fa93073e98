"""`python -m benchmarks op`: relative attention alone, forward and backward, with every backend of the device.

Then attention in both directions, beside the sublayers of Wav2Vec2Conformer and XLNet with the same weights.
"""

from __future__ import annotations

from typing import Any

from transformer_xl.ops import BACKENDS

from . import bound
from .gate import check_op, check_output
from .options import Options, finish, header, show
from .race import Contender, Pool, race

_PEERS = ("Wav2Vec2Conformer", "Wav2Vec2Conformer, eager", "XLNet")
_COLUMNS = {
    "contender": "",
    "precision": "precision",
    "milliseconds": "forward ms|.2f",
    "backward_milliseconds": "and backward ms|.2f",
    "ratio": "times|.2f",
    "backward_ratio": "times|.2f",
    "share_of_bound": "of the bound|.0%",
    "backward_share_of_bound": "of the bound|.0%",
    "backward_peak_megabytes": "MB on top|,.0f",
}
_SUBLAYERS = {name: title for name, title in _COLUMNS.items() if "bound" not in name}


def bench_op(options: Options, pool: Pool) -> None:
    """Time all backends at each length, and print a table for each and a line of JSON.

    Raises:
        AssertionError: a backend fails the contract, so no time is reported.
    """
    backends = [name for name in BACKENDS if name != "reference" and _serves(name, options)]
    result = header("op", options) | {"cases": []}
    model = options.config().model
    on_gpu = options.torch_device.startswith("cuda")
    lengths = (32,) if options.toy else (512, 1024, 4096) if on_gpu else (512,)
    lengths = lengths if options.tgt_len is None else (options.tgt_len,)
    for length in lengths:
        memory = length if options.mem_len is None else options.mem_len
        sizes = {"batch": options.batch_size or 2, "tgt_len": length, "mem_len": memory}
        sizes |= {"heads": model.n_head, "head_size": model.d_head}
        result["cases"].append(_case(options, backends, sizes, pool))
        pool.release()
    result["both_directions"] = _both_directions(options, pool)
    finish(result)


def _serves(backend: str, options: Options) -> bool:
    """Whether a backend runs on this device. Raises an AssertionError if it fails the contract."""
    for backward in (False, True):
        try:
            check_op([backend], options.precisions, options.torch_device, backward=backward)
        except ValueError:
            return backward  # an inference backend has no backward
    return True


def _case(options: Options, backends: list[str], sizes: dict[str, Any], pool: Pool) -> dict[str, Any]:
    names = {"textbook": ("benchmarks.textbook", "TextbookOp")} | dict.fromkeys(backends, ("benchmarks.ours", "Op"))
    if options.torch_device.startswith("cuda"):
        names["FlexAttention"] = ("benchmarks.flex", "FlexOp")
    refused: dict[str, str] = {}
    rows: list[dict[str, Any]] = [{"contender": name, "precision": p} for p in options.precisions for name in names]
    work = bound.Work(sizes["batch"], sizes["tgt_len"], sizes["mem_len"])
    for backward in (False, True):
        prefix = "backward_" if backward else ""
        common = sizes | {"backward": backward, "device": options.torch_device}
        runners = {}
        products = bound.attention_products(work, sizes["heads"], sizes["head_size"], training=backward)
        contenders = [Contender(row["contender"], row["precision"], *names[row["contender"]]) for row in rows]
        ready = pool.prepare({c: common | {"precision": c.precision, "backend": c.label} for c in contenders}, refused)
        for precision in options.precisions:
            job = common | {"precision": precision, "products": products}
            runners |= pool.prepare_rate(f"bound {precision}", "Products", job)
        timings = race(ready | runners, options.repeats, turn_seconds=options.turn_seconds)
        for row in rows:
            key = f"{row['contender']} {row['precision']}"
            if key not in ready:
                continue
            row[f"{prefix}milliseconds"] = timings[key].median * 1e3
            row[f"{prefix}least_and_most"] = [timings[key].least, timings[key].most]
            row[f"{prefix}ratio"] = timings[f"textbook {row['precision']}"].median / timings[key].median
            row[f"{prefix}share_of_bound"] = timings[f"bound {row['precision']}"].median / timings[key].median
            row[f"{prefix}peak_megabytes"] = ready[key].peak() / 1e6
    case = sizes | {"rows": rows, "refused": refused}
    title = (
        f"op: batch {sizes['batch']}, {sizes['heads']} heads of {sizes['head_size']}, {sizes['tgt_len']} queries "
        f"after {sizes['mem_len']} keys; median of {options.repeats}; times as fast as the textbook form"
    )
    notes = [f"{key} has empty columns: {why}" for key, why in refused.items()]
    show("\n".join([title, *notes]), _COLUMNS, rows)
    return case


def _both_directions(options: Options, pool: Pool) -> list[dict[str, Any]]:
    """Time our module beside each peer, both with the peer's weights.

    Raises:
        AssertionError: the results differ by more than rounding, so no time is reported.
    """
    model = options.config().model
    length = 64 if options.toy else 1000 if options.tgt_len is None else options.tgt_len
    common: dict[str, Any] = {"width": model.n_head * model.d_head, "heads": model.n_head, "length": length}
    common |= {"batch": options.batch_size or 2, "device": options.torch_device}
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    for precision in options.precisions:
        for peer in _PEERS:
            names = (peer, f"ours for {peer}")
            pair: list[dict[str, Any]] = [{"contender": name, "precision": precision} for name in names]
            for prefix in ("", "backward_"):
                job = common | {"precision": precision, "peer": peer, "backward": bool(prefix)}
                theirs, ours = (
                    Contender(row["contender"], precision, "benchmarks.bidirectional", "Sublayer") for row in pair
                )
                ready = pool.prepare({theirs: job | {"ours": False}, ours: job | {"ours": True}}, refused)
                if len(ready) < 2:
                    break
                check_output(ready[theirs.key], ready[ours.key], precision)
                timings = race(ready, options.repeats, turn_seconds=options.turn_seconds)
                for row, contender in zip(pair, (theirs, ours), strict=True):
                    row[f"{prefix}milliseconds"] = timings[contender.key].median * 1e3
                    row[f"{prefix}ratio"] = timings[theirs.key].median / timings[contender.key].median
                    row[f"{prefix}peak_megabytes"] = ready[contender.key].peak() / 1e6
                pool.release()
            else:
                rows += pair
    title = f"both directions: batch {common['batch']}, {common['heads']} heads, {length} positions, no padding"
    notes = [f"{key} does not take part: {why}" for key, why in refused.items()]
    show("\n".join([title, *notes]), _SUBLAYERS, rows)
    return rows
