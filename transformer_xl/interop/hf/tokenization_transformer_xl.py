"""The tokenizer of an exported folder, for transformers 5 or newer."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast


class TransformerXLTokenizer(PreTrainedTokenizerFast):
    """A fast tokenizer whose line end also begins and ends a text (`bos_token`, `eos_token`).

    A line end is text all the same, so `skip_special_tokens` removes only padding; if that is the line end, too, only
    before the text. Special tokens of the user's own tokenizer are removed as usual.
    """

    def _decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> str:
        pad = self.pad_token_id
        if skip_special_tokens and self.split_special_tokens and pad is not None:
            ids = [token_ids] if isinstance(token_ids, int) else [int(i) for i in token_ids]
            first = next((at for at, i in enumerate(ids) if i != pad), len(ids))
            token_ids = ids[first:] if pad == self.bos_token_id else [i for i in ids if i != pad]
        return super()._decode(token_ids, skip_special_tokens and not self.split_special_tokens, **options)


TransformerXLTokenizer.register_for_auto_class("AutoTokenizer")
