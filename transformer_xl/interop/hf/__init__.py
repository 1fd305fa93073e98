"""Our model for Hugging Face's transformers, 5 or newer: classes, export and tokenizer."""

from __future__ import annotations

from ...mistake import Mistake

try:
    import transformers

    if int(transformers.__version__.partition(".")[0]) < 5:
        raise ImportError(f"this is {transformers.__version__}")
except ImportError as _error:
    raise Mistake(
        f"Hugging Face's format must have the transformers library, 5 or newer ({_error}). "
        'Run `pip install -U "transformers>=5"`.'
    ) from _error
