"""Support for Hugging Face's transformers, 5 or newer. Importing this registers our model with its Auto classes:

    import transformer_xl.hf
    model = AutoModelForCausalLM.from_pretrained(FOLDER)

`export_huggingface` writes FOLDER. FOLDER has its own copy of the classes, which is not used then.
"""

from __future__ import annotations

from .interop.hf.cache import TransformerXLCache
from .interop.hf.export import export_huggingface, read_classifier
from .interop.hf.modeling_transformer_xl import (
    TransformerXLForCausalLM,
    TransformerXLForSequenceClassification,
    TransformerXLHFConfig,
    TransformerXLModel,
)
from .interop.hf.tokenization_transformer_xl import TransformerXLTokenizer
from .interop.hf.tokenizer import fast_tokenizer

from transformers import (  # isort: skip  (its absence is reported by interop.hf)
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

__all__ = [
    "TransformerXLCache",
    "TransformerXLForCausalLM",
    "TransformerXLForSequenceClassification",
    "TransformerXLHFConfig",
    "TransformerXLModel",
    "TransformerXLTokenizer",
    "export_huggingface",
    "fast_tokenizer",
    "read_classifier",
]

AutoConfig.register(TransformerXLHFConfig.model_type, TransformerXLHFConfig, exist_ok=True)
AutoModel.register(TransformerXLHFConfig, TransformerXLModel, exist_ok=True)
AutoModelForCausalLM.register(TransformerXLHFConfig, TransformerXLForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(
    TransformerXLHFConfig, TransformerXLForSequenceClassification, exist_ok=True
)
AutoTokenizer.register(TransformerXLHFConfig, fast_tokenizer_class=TransformerXLTokenizer, exist_ok=True)
