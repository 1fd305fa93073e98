"""`TransformerXL` as a model of Hugging Face's transformers, 5 or newer: configuration, cache and model.

The layers are from `transformer_xl.model`. An exported folder has this file and the files that it imports, so
`AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)` needs only torch and transformers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, fields
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

from ...config.settings import Lengths, TrainConfig, TransformerXLConfig
from ...mistake import Mistake
from ...model.transformer_xl import TransformerXL
from .cache import TransformerXLCache

_CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"
"""The name of the memory in what a call returns: transformers 5.24 renamed it."""
_DEFAULTS: dict[str, Any] = {
    **asdict(TransformerXLConfig(vocab_size=0)),
    **asdict(TrainConfig().lengths),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}


class TransformerXLHFConfig(PreTrainedConfig):
    """`TransformerXLConfig` and `Lengths`, flat and with the same names.

    `run` has the other sections of the model's run; `pooling` and `gradient_segments` are for classification.
    `tie_weight` and `tie_projs` set the ties of weights; `tie_word_embeddings` has no effect. If `tie_weight` is
    changed, weights missing in a folder are initialised.
    """

    model_type = "transformer-xl"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    }
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]

    def __init__(self, **settings: Any):
        values = _DEFAULTS | {self.attribute_map.get(name, name): value for name, value in settings.items()}
        values.setdefault("run", {})
        values.setdefault("gradient_segments", 1)
        values.setdefault("pooling", "mean")
        values["tie_word_embeddings"] = True  # this allows ties; the model sets them
        super().__init__(**values)

    @property
    def shape(self) -> TransformerXLConfig:
        """The settings that shape the weights."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(TransformerXLConfig)}
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}  # JSON has lists
        return TransformerXLConfig(**values)

    @property
    def lengths(self) -> Lengths:
        """The lengths of a call."""
        return Lengths(**{field.name: getattr(self, field.name) for field in fields(Lengths)})

    def save_pretrained(
        self, save_directory: str | PathLike[str], push_to_hub: bool = False, **options: object
    ) -> None:
        """Save as transformers does, and write the code too, which it copies itself if a folder's code is in use."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        if __name__.startswith("transformer_xl."):
            self.auto_map: dict[str, str] = import_module(".export", __package__).write_source(save_directory)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **options)


class TransformerXLPreTrainedModel(PreTrainedModel):
    """A `TransformerXL` under `model`, with its memory as `past_key_values`: what the models below share.

    Inputs longer than `tgt_len` are read in segments of that length (the first may be shorter), so a text of any length
    needs the same amount of RAM. Reading a text at once or token by token gives the same numbers if the memory has room
    for all of it (and holds no zeros), or if `attn_len` limits the window. Otherwise the first token of a segment
    attends to fewer positions than the last.
    """

    config_class: type = TransformerXLHFConfig
    base_model_prefix = "model"
    _is_stateful = True  # transformers then refuses assisted decoding, which removes tokens

    def __init__(self, config: TransformerXLHFConfig):
        super().__init__(config)
        if not config.vocab_size:
            raise Mistake("vocab_size must be the number of tokens, got 0. Give it to TransformerXLHFConfig.")
        self.model: TransformerXL = TransformerXL(config.shape)
        self.add_weights(config)
        self._tied_weights_keys = _tied_names(self)
        self.post_init()

    def add_weights(self, config: TransformerXLHFConfig) -> None:
        """Weights of a subclass. Here there are none."""

    def get_input_embeddings(self) -> nn.Module:
        """The adaptive embedding: ids to vectors."""
        return self.model.embedding

    def get_output_embeddings(self) -> None:
        """Return None, because the softmax is not a single table."""

    def resize_token_embeddings(self, *sizes: object, **options: object) -> NoReturn:
        """Raise `Mistake`: the bands of the vocabulary are fixed."""
        raise Mistake("The vocabulary of a Transformer-XL cannot be resized. Use the tokenizer it was exported with.")

    def _cache(self, given: Cache | None, ids: Int[Tensor, "B T"], mask: Tensor | None) -> TransformerXLCache:
        """The memory with which a call starts: the given one, or an empty one with each row's padding."""
        given = TransformerXLCache() if given is None else given
        if not isinstance(given, TransformerXLCache):
            kind = type(given).__name__
            raise Mistake(f"past_key_values must be what this model returned, got a {kind}. Leave it out to begin.")
        rows, length = ids.shape
        if given.memory is not None and given.batch_size != rows:
            raise Mistake(
                f"past_key_values must hold a row for each row of the inputs, {rows}, got {given.batch_size}. "
                "Use its batch_repeat_interleave or reorder_cache."
            )
        if mask is None or (given.memory is not None and mask.dim() == 2 and mask[:, -length:].all()):
            return given
        of_texts = mask.shape == (rows, length) and mask[:, -1].all() and (mask[:, 1:] >= mask[:, :-1]).all()
        if given.memory is not None or not of_texts:
            raise Mistake(
                "attention_mask must be zeros, then a one or more, of the shape of input_ids, and ones after a memory: "
                'texts are padded on the left. Set tokenizer.padding_side = "left".'
            )
        if mask.all():
            return given
        if self.model.config.zero_memory:
            raise Mistake("This model attends zeros before a text (zero_memory), so texts must be of one length.")
        return TransformerXLCache(self.model.empty_memory(rows, self.config.lengths, mask.sum(1) - length))

    def _start(
        self,
        input_ids: Int[Tensor, "B T"] | None,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        cache: Cache | None,
        output_attentions: bool | None,
        output_hidden_states: bool | None = None,
        inputs_embeds: object = None,
    ) -> tuple[Int[Tensor, "B T"], Tensor | None, TransformerXLCache]:
        """The ids and the mask of a call, checked, and the memory with which it starts."""
        if inputs_embeds is not None:
            raise Mistake("inputs_embeds must be left out. Give input_ids.")
        if input_ids is None or not input_ids.numel():
            raise Mistake("input_ids must hold a token or more. Leave it out of generate to begin after a line end.")
        if output_attentions:
            raise Mistake("output_attentions must be False or left out: `txl analyse attention` has maps.")
        if output_hidden_states:
            raise Mistake("output_hidden_states must be False or left out: TransformerXLModel (AutoModel) has them.")
        mask = None if attention_mask is None else attention_mask.bool()
        return input_ids, mask, self._cache(past_key_values if cache is None else cache, input_ids, mask)

    def _segments(
        self, ids: Int[Tensor, "B T"], cache: TransformerXLCache, with_gradient: Collection[int] | None = None
    ) -> Iterator[tuple[int, list[Float[Tensor, "B L D"]], TransformerXLCache]]:
        """For each segment its end, the outputs of each layer and the cache after it; gradients only in the segments
        `with_gradient` (None: as in the caller)."""
        lengths, total = self.config.lengths, ids.shape[1]
        for number, end in enumerate(self._ends(total)):
            kept = torch.is_grad_enabled() and (with_gradient is None or number in with_gradient)
            with torch.set_grad_enabled(kept):
                outputs, cache = cache.read(self.model, ids[:, max(end - lengths.tgt_len, 0) : end], lengths)
            yield end, outputs, cache

    def _ends(self, total: int) -> range:
        """The ends of the segments of a text of `total` tokens."""
        return range((total - 1) % self.config.tgt_len + 1, total + 1, self.config.tgt_len)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise all weights as training does. transformers applies this only to weights that a folder lacks."""
        self.model.init_weights()
        for name, weight in self.named_parameters():
            if not name.startswith("model."):
                nn.init.normal_(weight, 0.0, self.config.init_std)
            weight._is_hf_initialized = True  # type: ignore[attr-defined]

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False


class TransformerXLForCausalLM(TransformerXLPreTrainedModel, GenerationMixin):
    """The language model: log-probabilities of the next token."""

    accepts_loss_kwargs = True

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Int[Tensor, "*S"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        inputs_embeds: object = None,  # PEFT names it in every call
        cache: Cache | None = None,
    ) -> CausalLMOutputWithPast:
        """Read `input_ids` after the memory in `past_key_values`.

        Args:
            attention_mask: 1 for text and 0 for padding, which must be on the left of a text.
            cache: the name of `past_key_values` from transformers 5.24 on. Both names serve with every version.
            labels: ids, with -100 at positions that are not scored. The model shifts them.
            use_cache: whether to return the memory; True by default.
            logits_to_keep: return the log-probabilities of this number of last positions, or of the positions in this
                tensor; 0 returns all.
            num_items_in_batch: the divisor of the summed loss; by default the number of scored labels.

        Returns:
            `logits` are log-probabilities, so their softmax is exact. They are None in training with labels, because
            they are large and the loss does not need them. `loss` is the mean nats per label.
        """
        ids, mask, cache = self._start(
            input_ids, attention_mask, past_key_values, cache, output_attentions, output_hidden_states, inputs_embeds
        )
        if labels is not None and labels.shape != ids.shape:
            shapes = f"{tuple(ids.shape)}, got {tuple(labels.shape)}"
            raise Mistake(f"labels must have the shape of input_ids, {shapes}. They are shifted by the model.")
        keep = logits_to_keep if labels is None and isinstance(logits_to_keep, int) else 0
        features, past = [], cache
        for end, outputs, after in self._segments(ids, cache):
            past = after
            if not keep or ids.shape[1] - end < keep:
                features.append(self.model.dropout(outputs[-1]))
        hidden = torch.cat(features, dim=1)
        loss = None if labels is None else self._loss(hidden, labels, mask, num_items_in_batch)
        logits = None
        if labels is None or not self.training:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.model.softmax.log_probs(hidden[:, kept])
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{_CACHE: None if use_cache is False else past})  # type: ignore[arg-type]

    def prepare_inputs_for_generation(
        self, input_ids: Int[Tensor, "B T"], tokenizer: object = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Prepare inputs as transformers does, without unused ones: positions, the tokenizer of `stop_strings`."""
        positions = kwargs.get("cache_position")  # before 5.3 of the new tokens, before 5.4 of all tokens
        new = kwargs.get("next_sequence_length", None if positions is None else len(positions))
        if new is not None and new < 1:
            seen = (kwargs.get(_CACHE) or TransformerXLCache()).get_seq_length()
            raise Mistake(
                f"input_ids of generate must be the whole text so far, more than the {seen} tokens that "
                f"past_key_values has seen, got {input_ids.shape[1]}. Give it the sequences that came with it."
            )
        if _CACHE != "cache" and kwargs.get("cache") is not None:  # generate would give it again with each token
            raise Mistake("cache is past_key_values in generate before transformers 5.24. Use that name.")
        read = self.config.mem_len and (past := kwargs.get(_CACHE)) is not None and past.get_seq_length()
        if read and kwargs.get("use_cache") is False:  # generate gives the whole text each time
            raise Mistake(f"use_cache must be left out with {_CACHE} in generate: it would read the text twice.")
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)  # type: ignore[attr-defined]
        inputs.pop("cache_position", None)
        if self.config.mem_len == 0:  # without memory, read the last tokens again for each token
            inputs |= {"input_ids": input_ids[:, -self.config.tgt_len :], _CACHE: None}
            if inputs.get("attention_mask") is not None:
                inputs["attention_mask"] = inputs["attention_mask"][:, -self.config.tgt_len :]
        return inputs

    def _loss(
        self,
        hidden: Float[Tensor, "B T D"],
        labels: Int[Tensor, "B T"],
        mask: Tensor | None,
        count: int | Tensor | None,
    ) -> Float[Tensor, ""]:
        """Mean nats of the labels after the first token of a text. Predictions at padding do not count."""
        targets = labels[:, 1:].long()
        scored = targets >= 0
        if mask is not None:
            scored = scored & mask[:, -labels.shape[1] : -1]
        nll = self.model.softmax.nll(hidden[:, :-1], targets.masked_fill(~scored, -1))
        return nll.sum() / (scored.sum().clamp(min=1) if count is None else count)


# Trainer shifts the labels of these names only; with `label_smoothing_factor` another model would learn to copy.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TransformerXLHFConfig.model_type] = TransformerXLForCausalLM.__name__


class TransformerXLModel(TransformerXLPreTrainedModel):
    """The vectors of a text: what `AutoModel` loads."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        inputs_embeds: object = None,  # PEFT names it in every call
        cache: Cache | None = None,
    ) -> BaseModelOutputWithPast:
        """Read `input_ids` after the memory in `past_key_values`; the arguments are those of
        `TransformerXLForCausalLM`.

        Returns:
            `last_hidden_state`, the last layer's output, [B, T, D]; and `hidden_states`, the output of every layer.
        """
        ids, _, cache = self._start(
            input_ids, attention_mask, past_key_values, cache, output_attentions, inputs_embeds=inputs_embeds
        )
        found, past = [], cache
        for _, outputs, after in self._segments(ids, cache):
            past = after
            found.append(outputs if output_hidden_states else outputs[-1:])
        layers = tuple(torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        shown: Any = layers if output_hidden_states else None
        kept: Any = None if use_cache is False else past
        return BaseModelOutputWithPast(last_hidden_state=layers[-1], hidden_states=shown, **{_CACHE: kept})


class TransformerXLForSequenceClassification(TransformerXLPreTrainedModel):
    """A class or a number for a text of any length: a linear layer on the mean of the last layer's outputs.

    A text is read in segments, and the mean is over all of its tokens; with `config.pooling` "last" it is the output of
    the last token, and the gradient that of the last segment. Otherwise, in training, the gradient comes from
    `config.gradient_segments` of its segments, drawn at random and weighted so that its expectation is the gradient of
    all: the memory that training needs does not grow with the text. None: all segments.
    """

    def add_weights(self, config: TransformerXLHFConfig) -> None:
        """The linear layer."""
        pooling, drawn = config.pooling, config.gradient_segments
        if pooling not in ("mean", "last"):
            raise Mistake(f"pooling must be mean or last, got {pooling!r}.")
        if drawn is not None and (type(drawn) is not int or drawn < 1):
            raise Mistake(f"gradient_segments must be at least 1, or None for all segments, got {drawn!r}.")
        self.score: nn.Linear = nn.Linear(config.d_model, config.num_labels or 1, bias=False)

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        inputs_embeds: object = None,  # PEFT names it in every call
        cache: Cache | None = None,
    ) -> SequenceClassifierOutputWithPast:
        """`logits` [B, num_labels] of whole texts, padded on the left; `past_key_values` is what comes before them.

        Args:
            labels: a class of each text; with `num_labels` 1 a number, whose loss is the squared error; or 0 and 1 for
                each label with `config.problem_type` "multi_label_classification".
            use_cache: has no effect, because no memory is returned.
        """
        ids, mask, cache = self._start(
            input_ids, attention_mask, past_key_values, cache, output_attentions, output_hidden_states, inputs_embeds
        )
        own = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[:, -ids.shape[1] :]
        count, drawn = len(self._ends(ids.shape[1])), None
        if self.config.pooling == "last":
            own, drawn = torch.zeros_like(own), [count - 1]
            own[:, -1] = True
        elif torch.is_grad_enabled() and self.training and self.config.gradient_segments:
            drawn = torch.randperm(count)[: self.config.gradient_segments].tolist()
        total: Any = 0.0
        for number, (end, outputs, _) in enumerate(self._segments(ids, cache, drawn)):
            features = self.model.dropout(outputs[-1])
            part = (features * own[:, end - features.shape[1] : end, None]).sum(1)
            if self.config.pooling == "mean" and drawn is not None and number in drawn:  # the same value, more gradient
                part = part.detach() + (part - part.detach()) * (count / len(drawn))
            total = total + part
        logits = self.score(total / own.sum(1, keepdim=True))
        loss = None if labels is None else self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(loss=loss, logits=logits)


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Patterns of the later names of tied weights, mapped to the first names."""
    first: dict[Tensor, str] = {}
    names = {name: first.setdefault(weight, name) for name, weight in model.named_parameters(remove_duplicate=False)}
    return {f"{name}$": f"{source}$" for name, source in names.items() if name != source}
