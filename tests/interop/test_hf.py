"""Exported folders give the same numbers, text and ids in Hugging Face's transformers, without this package."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import VARIANTS, VOCAB, read, small_model, text

from transformer_xl.config.settings import CorpusConfig, EvalConfig, RunConfig
from transformer_xl.data.vocab import Vocab
from transformer_xl.evaluation.generate import Sampling, generate
from transformer_xl.interop.reading import read_model
from transformer_xl.mistake import Mistake
from transformer_xl.run.checkpoint import LoadedModel

transformers = pytest.importorskip("transformers", minversion="5")

from safetensors.torch import load, load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache  # noqa: E402

from transformer_xl import hf  # noqa: E402
from transformer_xl.hf import TransformerXLForCausalLM, TransformerXLHFConfig, export_huggingface  # noqa: E402

transformers.utils.logging.disable_progress_bar()

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
"""For float32 sums of about ten terms, added in another order."""
WORDS = Vocab("word", ("<eos>", "the", "<unk>", *(f"w{i}" for i in range(VOCAB - 3))))


def loaded(vocab: Vocab = WORDS, *, tgt_len: int = 5, mem_len: int = 64, attn_len=None, **shape) -> LoadedModel:
    """A model of random weights in float32, the type of checkpoints."""
    model = small_model(dtype=torch.float32, **({"vocab_size": len(vocab)} | shape))
    test = EvalConfig(tgt_len=tgt_len, mem_len=mem_len, attn_len=attn_len)
    corpus = CorpusConfig(name="mine", unit=vocab.unit)
    return LoadedModel(model, vocab, RunConfig(model=model.config, corpus=corpus, eval=test))


def exported(folder: Path, **changes) -> tuple[LoadedModel, TransformerXLForCausalLM]:
    ours = loaded(**changes)
    export_huggingface(ours, folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    for weight in theirs.parameters():  # transformers leaves them in the file's buffer, where MKL rounds another way
        weight.data = weight.data.clone()
    return ours, theirs


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[LoadedModel, TransformerXLForCausalLM, Path]:
    folder = tmp_path_factory.mktemp("hf") / "model"
    return *exported(folder), folder


def test_a_text_begins_after_a_line_end(tmp_path):
    vocab = Vocab("word", ("the", "<eos>", "<unk>"))
    _, theirs = exported(tmp_path / "words", vocab=vocab)
    _, without = exported(tmp_path / "letters", vocab=Vocab("char", ("a", "b", "<unk>"), "drop"))
    for model, first in ((theirs, 1), (without, 0)):
        assert model.config.bos_token_id == model.generation_config.bos_token_id == first


@pytest.mark.parametrize("variant", VARIANTS)
def test_log_probabilities_equal_ours_bit_for_bit(variant, tmp_path):
    ours, theirs = exported(tmp_path / "model", **VARIANTS[variant])
    ids = text(2, 13)
    hidden = read(ours.model, ids, ours.config.eval_lengths, pieces=[3, 5, 5]).hidden
    with torch.no_grad():
        logits = theirs(ids).logits
        assert torch.equal(logits, ours.model.softmax.log_probs(hidden))
        for keep, kept in ((2, [-2, -1]), (7, [*range(-7, 0)]), (torch.tensor([1, 7]), [1, 7])):
            torch.testing.assert_close(theirs(ids, logits_to_keep=keep).logits, logits[:, kept], **CLOSE)
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(2, 13))
    assert {name.removeprefix("model.") for name in theirs.state_dict()} == set(ours.model.state_dict())
    again = read_model(tmp_path / "model", "huggingface").model.state_dict()
    torch.testing.assert_close(again, ours.model.state_dict(), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("tokens", "changes"),
    [(200, {}), (20, {"mem_len": 6, "attn_len": 7}), (20, {"zero_memory": True, "mem_len": 9}), (20, {"mem_len": 0})],
)
def test_greedy_text_equals_ours(tokens, changes, tmp_path):
    ours, theirs = exported(tmp_path / "model", **changes)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    prompt = "the w3 w9\nw1 w1 w4 nowhere w7 the w0"
    ids = theirs.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=tokens)[0]
    written = generate(ours.model, ours.vocab, [prompt], ours.config.eval_lengths, Sampling(temperature=0), tokens)[0]
    assert tokenizer.decode(ids) == ours.vocab.decode(ours.vocab.encode(prompt)) + written


def test_a_model_that_reads_a_context_again_writes_our_text(tmp_path):
    """The folder has the lengths of writing. A run that is made of it has its own."""
    ours = loaded(mem_len=0)
    ours = ours._replace(config=replace(ours.config, eval=replace(ours.config.eval, context_len=9)))
    export_huggingface(ours, tmp_path / "model")
    assert "| 14, 0 tokens (`config.tgt_len`" in (tmp_path / "model" / "README.md").read_text()
    theirs, prompt = AutoModelForCausalLM.from_pretrained(tmp_path / "model"), "w3 w9 w1 w1 w4 w7 the w0"
    ids = AutoTokenizer.from_pretrained(tmp_path / "model")(prompt, return_tensors="pt")
    lengths = ours.config.writing_lengths(ours.config.eval_lengths)
    written = generate(ours.model, ours.vocab, [prompt], lengths, Sampling(temperature=0), 20)[0]
    found = theirs.generate(**ids, max_new_tokens=20)[0].tolist()
    assert ours.vocab.decode(found).endswith(written) and lengths.tgt_len == 14
    assert read_model(tmp_path / "model", "huggingface").config.eval_lengths == ours.config.eval_lengths


def test_the_folder_does_not_name_the_users_folders(tmp_path):
    ours = loaded()
    corpus = CorpusConfig(name=str(tmp_path / "secret" / "text.txt"))  # its tokens are not said
    export_huggingface(ours._replace(config=replace(ours.config, corpus=corpus)), tmp_path / "model")
    stated = (tmp_path / "model" / "config.json").read_text()
    assert "secret" not in stated and "text.txt" not in stated
    assert "text.txt" in (tmp_path / "model" / "README.md").read_text()
    assert read_model(tmp_path / "model", "huggingface").config.corpus == CorpusConfig(unit="word")


@pytest.mark.parametrize("changes", [{}, {"mem_len": 6, "attn_len": 7}])
def test_the_cache_changes_no_text_if_each_token_sees_the_same(changes, tmp_path):
    _, theirs = exported(tmp_path / "model", **changes)
    cached, uncached = (theirs.generate(text(2, 7), max_new_tokens=15, use_cache=cache) for cache in (True, False))
    assert torch.equal(cached, uncached)


def test_a_beam_per_token_finds_the_best_of_all_continuations(pair):
    _, theirs, _ = pair
    prompt = text(1, 6)
    found = theirs.generate(
        prompt, max_new_tokens=2, num_beams=VOCAB, return_dict_in_generate=True, output_scores=True, length_penalty=1.0
    )
    every = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    with torch.no_grad():
        logits = theirs(torch.cat([prompt.expand(len(every), -1), every], dim=1)).logits
    scores = logits[:, -3:-1].gather(2, every[..., None]).sum((1, 2))
    assert found.sequences[0, -2:].tolist() == every[scores.argmax()].tolist()
    torch.testing.assert_close(found.sequences_scores[0], scores.max() / 2, **CLOSE)


def test_continuing_from_a_memory_equals_generating_at_once(pair):
    _, theirs, _ = pair
    options = {"max_new_tokens": 9, "return_dict_in_generate": True}
    first = theirs.generate(text(2, 8), **options)
    name = "cache" if "cache" in first else "past_key_values"  # renamed in transformers 5.24
    memory = first[name]
    assert memory.get_seq_length() == 8 + 9 - 1  # the newest token is not read yet
    second = theirs.generate(first.sequences, **{name: memory}, **options)
    assert torch.equal(second.sequences, theirs.generate(text(2, 8), max_new_tokens=18))
    again = theirs.generate(first.sequences, **{name: memory}, **options)
    assert torch.equal(again.sequences, second.sequences), "a call left its mark on the memory it was given"
    for tokens in (1, 8, memory.get_seq_length()):
        with pytest.raises(ValueError, match=f"more than the 16 tokens that past_key_values has seen, got {tokens}. "):
            theirs.generate(first.sequences[:, :tokens], **{name: memory}, **options)
    with pytest.raises(Mistake, match="would read the text twice"):
        theirs.generate(first.sequences, **{name: memory}, **options, use_cache=False)


def padded(ids: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """`ids` with the first `counts` tokens of each row as padding, and the mask."""
    mask = (torch.arange(ids.shape[1]) >= torch.tensor(counts)[:, None]).long()
    return ids * mask, mask


@given(counts=st.lists(st.integers(0, 10), min_size=1, max_size=4), more=st.integers(1, 7))
@settings(max_examples=examples(15))
def test_a_padded_row_equals_the_row_alone(pair, counts, more):
    _, theirs, _ = pair
    ids, mask = padded(text(len(counts), 11), counts)
    new = text(len(counts), more, seed=1)
    with torch.no_grad():
        both = theirs(ids, attention_mask=mask)
        after = theirs(
            new, attention_mask=torch.cat([mask, torch.ones_like(new)], 1), past_key_values=both.past_key_values
        )
        for row, count in enumerate(counts):
            alone = theirs(ids[row : row + 1, count:])
            torch.testing.assert_close(both.logits[row, count:], alone.logits[0], **CLOSE)
            then = theirs(new[row : row + 1], past_key_values=alone.past_key_values)
            torch.testing.assert_close(after.logits[row], then.logits[0], **CLOSE)


def test_the_loss_and_its_gradient_equal_those_of_our_mean_nll(pair):
    ours, theirs, _ = pair
    ids = text(3, 5)
    nll, _ = ours.model(ids[:, :-1], ids[:, 1:], None, ours.config.eval_lengths)
    torch.testing.assert_close(theirs(ids, labels=ids).loss, nll.mean())
    labels = ids.masked_fill(torch.rand(3, 5, generator=torch.Generator().manual_seed(0)) < 0.4, -100)
    scored = labels[:, 1:] >= 0
    output = theirs(ids, labels=labels)
    torch.testing.assert_close(output.loss, nll[scored].mean())
    assert output.logits.shape == (3, 5, VOCAB)
    torch.testing.assert_close(theirs(ids, labels=labels, num_items_in_batch=7).loss, nll[scored].sum() / 7)
    theirs.train()
    output = theirs(ids, labels=ids, use_cache=False)
    theirs.eval()
    assert output.logits is None and output.past_key_values is None
    output.loss.backward()
    nll.mean().backward()
    for one, other in zip(theirs.model.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    theirs.zero_grad()
    ours.model.zero_grad()


def test_padding_is_neither_scored_nor_predicts(pair):
    _, theirs, _ = pair
    ids, mask = padded(text(2, 9), [0, 4])
    loss = theirs(ids, attention_mask=mask, labels=ids).loss
    alone = [theirs(row, labels=row).loss for row in (ids[:1], ids[1:, 4:])]
    torch.testing.assert_close(loss, (8 * alone[0] + 4 * alone[1]) / 12)


@pytest.mark.parametrize("variant", ["bands", "projected", "post-norm"])
def test_saving_again_gives_the_same_files_with_tied_weights_once(variant, tmp_path):
    ours, theirs = exported(tmp_path / "one", **VARIANTS[variant])
    theirs.save_pretrained(tmp_path / "two")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    state = again.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in theirs.state_dict().items())
    assert all(torch.equal(value, state[f"model.{name}"]) for name, value in ours.model.state_dict().items())
    stored = load_file(tmp_path / "two" / "model.safetensors")
    assert sum(t.numel() for t in stored.values()) == sum(p.numel() for p in ours.model.parameters())
    for file in (tmp_path / "two").iterdir():
        assert file.read_bytes() == (tmp_path / "one" / file.name).read_bytes(), file.name


def test_the_settings_of_the_folder_are_ours(pair):
    ours, theirs, folder = pair
    assert (folder / "LICENSE").read_bytes() == (Path(__file__).parents[2] / "LICENSE").read_bytes()
    assert theirs.config.shape == ours.model.config and theirs.config.lengths == ours.config.eval_lengths
    assert theirs.config.hidden_size == ours.model.config.d_model
    assert TransformerXLHFConfig(num_hidden_layers=3).shape.n_layer == 3


def test_only_missing_weights_are_initialised(pair, tmp_path):
    _, theirs, _ = pair
    theirs.save_pretrained(tmp_path)
    weights = load((tmp_path / "model.safetensors").read_bytes())  # load_file would map what is written below
    name = "model.backbone.layers.1.attention.qkv.weight"
    drawn = weights.pop(name)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    state = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(state[other], value) for other, value in weights.items())
    assert not torch.equal(state[name], drawn) and 0.2 < state[name].std() < 0.4, "init_std is 0.3"


def test_a_text_of_bytes_ends_after_a_stop_string(tmp_path):
    _, theirs = exported(tmp_path / "model", vocab=Vocab.build("byte", []))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    prompt = tokenizer("the ", return_tensors="pt")
    options = {"do_sample": True, "top_k": 5}
    torch.manual_seed(0)
    ids = theirs.generate(**prompt, max_new_tokens=60, **options)[0]
    stop = next(i for i in range(24, 64) if ids[i] < 0x80)
    end = ids[4:].tolist().index(ids[stop]) + 4
    torch.manual_seed(0)
    stopped = theirs.generate(
        **prompt, max_new_tokens=60, stop_strings=[chr(ids[stop])], tokenizer=tokenizer, **options
    )
    assert stopped[0].tolist() == ids[: end + 1].tolist()


def test_memory_supports_the_cache_interface(pair):
    _, theirs, _ = pair
    with torch.no_grad():
        cache = theirs(text(3, 7)).past_key_values
    assert (len(cache), cache.batch_size, cache.get_seq_length()) == (3, 3, 7)
    before = cache.memory
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.memory.layers[1], before.layers[1].repeat_interleave(2, 0))
    cache.reorder_cache(torch.tensor([0, 2, 4]))
    assert torch.equal(cache.memory.layers[1], before.layers[1])
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    assert torch.equal(cache.memory.layers[1], before.layers[1][[2, 2, 0]])
    cache.reset()
    assert (len(cache), cache.batch_size, cache.get_seq_length()) == (0, -1, 0)
    assert torch.equal(theirs(text(3, 7), past_key_values=cache).logits, theirs(text(3, 7)).logits)


@pytest.mark.parametrize("changes", [{}, {"zero_memory": True}, {"ngrams": (2,), "attn_len": 3}])
def test_keys_that_are_kept_while_a_text_is_written_are_those_of_the_memory(tmp_path, changes):
    """Without gradients; with them the memory is projected. The cache is also used in each other way."""
    _, theirs = exported(tmp_path / "model", mem_len=12, **changes)
    other_model = deepcopy(theirs.double())
    other_model.config = theirs.config
    padded = not changes.get("zero_memory")  # whose rows have one length
    torch.nn.init.normal_(other_model.model.backbone.layers[0].attention.qkv.weight)

    def write(mode: Callable[[int], AbstractContextManager[Any]], used: bool) -> torch.Tensor:
        theirs.config.clamp_len = None
        with mode(0):
            mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1] if padded else [1, 1, 1, 1]])
            found = [theirs(text(2, 4), attention_mask=mask)]
        cache = found[0].past_key_values
        for i, token in enumerate(text(2, 34).split(1, dim=1)):
            if i == 30:
                theirs.config.clamp_len = 3
            with mode(i):
                found.append(theirs(token, past_key_values=cache))
            after = found[-1].past_key_values
            if i == 8:  # copies, and the same cache twice
                others = ((text(2, 4) + 1) % VOCAB).split(1, dim=1)
                with mode(i):
                    for other, each in zip(others, (copy(after), after, after, deepcopy(after)), strict=True):
                        found.append(theirs(other, past_key_values=each))
                    found += [theirs(token, past_key_values=each.past_key_values) for each in found[-4:]]
            elif i == 18:
                after.reorder_cache(torch.tensor([1, 0]))
            elif i == 22:
                after.memory = after.memory.reset(torch.tensor([True, False]))
                after.reorder_cache(torch.tensor([1, 0]))
            elif i == 24:
                with mode(i):
                    found.append(theirs(token, past_key_values=copy(after)))
                    found.append(theirs(token, past_key_values=after))
                    found.append(theirs(token, past_key_values=copy(found[-1].past_key_values)))
            elif i == 26:
                after.reset()
            assert i not in (7, 14, 20) or (after._kept is not None and after._kept[2] is not None) == used
            cache = after
        with mode(33):
            found.append(other_model(token, past_key_values=copy(cache)))
            found.append(other_model(token, past_key_values=cache))
        return torch.cat([each.logits[:, -1] for each in found])

    again = write(lambda _: torch.enable_grad(), used=False)
    for inference in ((), (*range(13), 15)):
        found = write(lambda i, which=inference: torch.inference_mode() if i in which else torch.no_grad(), used=True)
        torch.testing.assert_close(found, again, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        written = theirs(text(2, 1)).past_key_values
        written = theirs(text(2, 1), past_key_values=written).past_key_values
        assert theirs.train()(text(2, 1), past_key_values=copy(written)).past_key_values._kept is None
        with pytest.raises(Mistake, match="memory must hold"):
            theirs.eval().float()(text(2, 1), past_key_values=written)


def test_the_trainer_shifts_the_labels_of_label_smoothing(pair, tmp_path):
    _, theirs, _ = pair
    batch = {"input_ids": text(2, 9), "labels": text(2, 9)}
    settings = transformers.TrainingArguments(tmp_path, label_smoothing_factor=1e-12, use_cpu=True, report_to=[])
    found = transformers.Trainer(deepcopy(theirs), settings).compute_loss(theirs, dict(batch))
    torch.testing.assert_close(found, theirs(**batch).loss, **CLOSE)


def test_a_hook_of_the_input_embeddings_is_called(pair):
    theirs = deepcopy(pair[1])
    before = theirs(text(2, 9))
    theirs.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output + 1)
    assert not torch.equal(theirs(text(2, 9)).logits, before.logits)


def test_the_memory_may_be_given_by_the_name_that_newer_transformers_use(pair):
    _, theirs, _ = pair
    others = hf.TransformerXLModel(theirs.config), hf.TransformerXLForSequenceClassification(theirs.config)
    with torch.no_grad():
        memory = theirs(text(3, 7)).past_key_values
        for model in (theirs, *(other.to(theirs.dtype).eval() for other in others)):
            found, expected = (model(text(3, 2), **{name: memory}) for name in ("cache", "past_key_values"))
            assert torch.equal(found[0], expected[0]) and not torch.equal(found[0], model(text(3, 2))[0])
    assert not all(memory.is_linear), "generate would read the whole text after the memory"
    if "cache" not in theirs(text(3, 7)):
        with pytest.raises(Mistake, match="past_key_values in generate before"):
            theirs.generate(text(3, 9), cache=memory, max_new_tokens=2)


REFUSED = {
    "right padding": ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0]] * 2)}, 'padding_side = "left"'),
    "no token": ({"input_ids": torch.empty(2, 0, dtype=torch.long)}, "Leave it out of generate"),
    "short labels": ({"labels": text(2, 4)}, r"input_ids, \(2, 5\), got \(2, 4\)"),
    "a short mask": ({"attention_mask": torch.tensor([[0, 1]] * 2)}, "of the shape of input_ids"),
    "no ids": ({"input_ids": None}, "input_ids must hold a token or more"),
    "attentions": ({"output_attentions": True}, "output_attentions must be False"),
    "vectors": ({"inputs_embeds": torch.zeros(2, 5, 14)}, "inputs_embeds must be left out"),
    "another's cache": ({"past_key_values": DynamicCache()}, "got a DynamicCache"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_inputs_are_refused_in_one_sentence(pair, case):
    options, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        pair[1](**{"input_ids": text(2, 5)} | options)


def test_peft_may_name_vectors_in_every_call(pair):
    """`PeftModelForCausalLM` gives `inputs_embeds=None`."""
    ids = text(2, 5)
    assert torch.equal(pair[1](ids, inputs_embeds=None).logits, pair[1](ids).logits)


def test_memory_refuses_other_rows_padding_and_cropping(pair, tmp_path):
    _, theirs, _ = pair
    cache = theirs(text(2, 5)).past_key_values
    with pytest.raises(ValueError, match="3, got 2"):
        theirs(text(3, 5), past_key_values=cache)
    with pytest.raises(ValueError, match="ones after a memory"):
        theirs(text(2, 3), attention_mask=torch.tensor([[1] * 5 + [0, 1, 1]] * 2), past_key_values=cache)
    with pytest.raises(ValueError, match="cannot be cropped"):
        cache.crop(1)
    with pytest.raises(ValueError, match="cannot be resized"):
        theirs.resize_token_embeddings(99)
    _, zeros = exported(tmp_path / "model", zero_memory=True)
    with pytest.raises(ValueError, match="of one length"):
        zeros(text(2, 3), attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]))


# The folder alone


ALONE = """
import re, sys
from pathlib import Path
sys.modules |= dict.fromkeys(("transformer_xl", "jaxtyping", "beartype"))
import torch
torch.manual_seed(0)
exec(re.search(r"```python\\n(.*?)```", Path("model/README.md").read_text(), re.DOTALL)[1])
torch.save(model(torch.load("ids.pt")).logits.detach(), "logits.pt")
model.save_pretrained("again")
model = AutoModelForCausalLM.from_pretrained("again", trust_remote_code=True)
assert torch.equal(model(torch.load("ids.pt")).logits, torch.load("logits.pt"))
from transformers import AutoModel, AutoModelForSequenceClassification
for kind, size in ((AutoModel, 14), (AutoModelForSequenceClassification, 2)):
    other = kind.from_pretrained("again", trust_remote_code=True)
    assert other(torch.load("ids.pt"))[0].shape[-1] == size
    assert "transformers_modules" in type(model).__module__ and "transformers_modules" in type(other).__module__
"""


def test_the_model_card_runs_without_this_package(pair, tmp_path):
    _, theirs, folder = pair
    (tmp_path / "model").symlink_to(folder)
    torch.save(text(2, 13), tmp_path / "ids.pt")
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", ALONE],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    assert torch.equal(torch.load(tmp_path / "logits.pt"), theirs(text(2, 13)).logits)
    assert {p.name for p in (tmp_path / "again").glob("*.py")} == {
        p.name for p in folder.glob("*.py") if p.name != "tokenization_transformer_xl.py"
    }


def test_the_code_of_the_folder_imports_only_itself_and_transformers(pair):
    files = {path.stem: path.read_text() for path in pair[2].glob("*.py")}
    allowed = {"numpy", "torch", "transformers", "typing_extensions", *sys.stdlib_module_names}
    for content in files.values():
        assert content.startswith("# transformer_xl/") and "MIT" in content.splitlines()[0]
        for node in ast.walk(ast.parse(content)):
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
            if isinstance(node, ast.ImportFrom) and node.level:
                assert ({node.module} if node.module else names) <= files.keys()
            elif names:
                names = {str(node.module)} if isinstance(node, ast.ImportFrom) else names
                assert {name.partition(".")[0] for name in names} <= allowed


def test_missing_transformers_is_named_in_one_sentence():
    code = "import sys; sys.modules['transformers'] = None; import transformer_xl.hf"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "Mistake: Hugging Face" in run.stderr and 'pip install -U "transformers>=5"' in run.stderr
