"""Check that a run exported to Hugging Face's transformers gives our numbers and text without this package.

    python -m experiments.huggingface RUN [--python PATH] [--out FOLDER]

The script exports the run and loads the folder in another Python, which has only torch and transformers >= 5. It
compares the log-probabilities of two streams of random ids and 200 greedy tokens, with the lengths of the run. Then it
compares greedy text with and without the cache, with a memory that holds all of the text.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

TOKENS = 200
IDS = 500
PROMPT = "the "


def here(run: str, folder: Path) -> None:
    """Export the run, and write our results next to the folder."""
    import torch
    from safetensors.torch import save_file

    from transformer_xl.evaluation.generate import Sampling, stream
    from transformer_xl.hf import export_huggingface
    from transformer_xl.run import load_model

    loaded = load_model(run)
    export_huggingface(loaded, folder)
    lengths, memory, said = loaded.config.eval_lengths, None, []
    ids = torch.randint(len(loaded.vocab), (2, IDS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for end in range((IDS - 1) % lengths.tgt_len + 1, IDS + 1, lengths.tgt_len):
            segment = ids[:, max(end - lengths.tgt_len, 0) : end]
            log_probs, memory = loaded.model.log_probs(segment, memory, lengths)
            said.append(log_probs)
    prompt = loaded.vocab.encode(PROMPT)
    steps = stream(loaded.model, [prompt], lengths, Sampling(temperature=0), TOKENS)
    greedy = torch.tensor([*prompt.tolist(), *(new for step in steps for _, new in step)])
    save_file({"ids": ids, "log_probs": torch.cat(said, 1), "greedy": greedy}, folder.with_suffix(".safetensors"))


def there(folder: Path) -> None:
    """The results of the exported folder alone."""
    import torch
    import transformers
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.utils.logging.disable_progress_bar()
    ours = load_file(folder.with_suffix(".safetensors"))
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        logits = model(ours["ids"]).logits
    greedy = model.generate(**prompt, max_new_tokens=TOKENS)[0]
    model.config.mem_len = TOKENS + prompt["input_ids"].shape[1]
    cached, uncached = (model.generate(**prompt, max_new_tokens=TOKENS, use_cache=cache)[0] for cache in (True, False))
    figures = {
        "class": f"{type(model).__module__.partition('.')[0]}: {type(model).__name__}",
        "packages": {"torch": torch.__version__, "transformers": transformers.__version__},
        "this package is there": any(name.partition(".")[0] in ("transformer_xl", "jaxtyping") for name in sys.modules),
        "log-probabilities": logits.numel(),
        "largest difference": (logits - ours["log_probs"]).abs().max().item(),
        "greedy tokens equal": int((greedy == ours["greedy"]).sum()) - prompt["input_ids"].shape[1],
        "with memory = without": bool(torch.equal(cached, uncached)),
        "text": tokenizer.decode(greedy[:40]),
    }
    print(json.dumps(figures, indent=1, ensure_ascii=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--python", default=sys.executable, help="of an environment without this package")
    parser.add_argument("--out", type=Path, help="where the exported folder stays; else it goes away")
    parser.add_argument("--there", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.there:
        return there(Path(options.run))
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.out or Path(temporary) / "model").absolute()
        here(options.run, folder)
        command = [options.python, "-P", __file__, str(folder), "--there"]
        subprocess.run(command, check=True, cwd=folder.parent)


if __name__ == "__main__":
    main()
