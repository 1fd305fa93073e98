"""Hugging Face's transformers, 5 or newer. Importing this teaches its Auto classes our models:

    import transformer_xl.hf
    model = AutoModelForCausalLM.from_pretrained(FOLDER)

where `export_huggingface` wrote the folder; none of the code in it runs then.
"""

from __future__ import annotations

try:
    import transformers

    if int(transformers.__version__.partition(".")[0]) < 5:
        raise ImportError(f"this is {transformers.__version__}")
except ImportError as error:
    raise ValueError(
        f"Hugging Face's format must have the transformers library, 5 or newer ({error}). "
        'Run `pip install -U "transformers>=5"`.'
    ) from error

from transformers import AutoConfig, AutoModelForCausalLM

from .export import export_huggingface
from .modeling_transformer_xl import TransformerXLCache, TransformerXLForCausalLM, TransformerXLHFConfig
from .tokenizer import fast_tokenizer

__all__ = [
    "TransformerXLCache",
    "TransformerXLForCausalLM",
    "TransformerXLHFConfig",
    "export_huggingface",
    "fast_tokenizer",
]

AutoConfig.register(TransformerXLHFConfig.model_type, TransformerXLHFConfig, exist_ok=True)
AutoModelForCausalLM.register(TransformerXLHFConfig, TransformerXLForCausalLM, exist_ok=True)
