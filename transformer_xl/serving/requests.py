"""What clients may ask for, in which form, and the limits of every size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from ..config.settings import Lengths
from ..data.vocab import is_text
from .texts import reach_of

PROMPT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}
STOP: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}

COLDEST = 1e-4
"""Smallest temperature above 0."""
LARGE = 10**30


class Refused(Exception):
    """An answer that is an error: its status, a sentence, and the field that is wrong."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status: int = status
        self.message: str = message
        self.param: str | None = param
        self.code: str | None = code


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest sizes that a request may have."""

    body_bytes: int = 4 << 20
    prompt_tokens: int = 1 << 17
    prompts: int = 64
    n: int = 16
    max_tokens: int = 1 << 14
    logprobs: int = 20
    stops: int = 16
    stop_characters: int = 256
    body_seconds: float = 30.0
    """Time for a client to send a request."""


class StreamOptions(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False


class Completion(BaseModel):
    """OpenAI's request for completions; `top_k`, `mem_len`, `previous_response_id` and `store` are ours."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None
    prompt: Annotated[Any, WithJsonSchema(PROMPT)] = ""
    """A text, token ids, or a list of either. A text begins after a line end; ids are read as they are."""
    max_tokens: int = 16
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: Annotated[Any, WithJsonSchema(STOP)] = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    echo: bool = False
    mem_len: int | None = None
    """Tokens before it that each token sees; by default as the model was trained."""
    previous_response_id: str | None = None
    """Go on after the text of this response, or of one of its choices, without reading it again."""
    store: bool = True
    """Keep what was read and written, so that `previous_response_id` can name it."""
    user: str | None = None
    best_of: int | None = None
    suffix: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


class Tokenize(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True)
    prompt: str


class Detokenize(BaseModel):
    tokens: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer"}})]


FORMS = {
    "prompt": "a text, a list of token ids, or a list of either",
    "stop": "a text that is not empty, or a list of such texts",
    "tokens": "a list of token ids",
    "stream_options": 'an object like {"include_usage": true}',
    "logit_bias": "left out",
    **dict.fromkeys(("max_tokens", "n", "top_k", "seed", "logprobs", "mem_len", "best_of"), "a whole number"),
    **dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty"), "a number"),
    **dict.fromkeys(("stream", "echo", "store"), "true or false"),
    **dict.fromkeys(("model", "previous_response_id", "user", "suffix"), "a text"),
}
"""What each field must be."""


def form_error(name: str) -> Refused:
    return Refused(400, f"{name} must be {FORMS.get(name, 'of another type')}.", name)


def check_completion(asked: Completion, limits: Limits, lengths: Lengths) -> None:
    """Raise `Refused` for the first field that is out of bounds or that we cannot obey."""
    for name, value, least, most in _bounds(asked, limits, lengths):
        if value is not None and not least <= value <= most:
            bound = f"at least {least}" if most == math.inf else f"from {least:,} to {most:,}"
            raise Refused(400, f"{name} must be {bound}, got {short(value)}.", name)
    if 0 < asked.temperature < COLDEST:
        raise Refused(400, f"temperature must be 0, or at least {COLDEST}, got {asked.temperature}.", "temperature")
    if not 0 < asked.top_p <= 1:
        raise Refused(400, f"top_p must be above 0 and at most 1, got {short(asked.top_p)}.", "top_p")
    for name, neutral in {"suffix": "", "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}}.items():
        if getattr(asked, name) not in (None, neutral):
            raise Refused(400, f"{name} is not supported. Leave it out.", name)
    if asked.best_of not in (None, asked.n):
        raise Refused(400, "best_of is not supported. Leave it out, or set it to n.", "best_of")
    for name in asked.model_extra or {}:
        raise Refused(400, f"There is no field {short(name)}. Leave it out.")
    if asked.previous_response_id is not None and asked.mem_len is not None:
        raise Refused(400, "mem_len is set where a text begins. Leave it out with previous_response_id.", "mem_len")


def _bounds(asked: Completion, limits: Limits, lengths: Lengths) -> Iterator[tuple[str, Any, float, float]]:
    yield "max_tokens", asked.max_tokens, 0, limits.max_tokens
    yield "n", asked.n, 1, limits.n
    yield "temperature", asked.temperature, 0, 1e4
    yield "top_k", asked.top_k, 0, math.inf
    yield "seed", asked.seed, -(2**63), 2**64
    yield "logprobs", asked.logprobs, 0, limits.logprobs
    yield "mem_len", asked.mem_len, 1, reach_of(lengths)


def stops_of(value: Any, limits: Limits) -> tuple[str, ...]:
    """The stop strings of a request."""
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(map(is_text, stops[: limits.stops + 1])):
        raise form_error("stop")
    if len(stops) > limits.stops or any(len(stop) > limits.stop_characters for stop in stops):
        sizes = f"{limits.stops} texts of {limits.stop_characters} characters"
        raise Refused(400, f"stop must be at most {sizes}.", "stop")
    return tuple(stops)


def prompts_of(value: Any, limits: Limits, vocab_size: int) -> list[str | list[int]]:
    """The prompts of a request, texts and lists of ids."""
    many = isinstance(value, list) and (not value or not _is_id(value[0]))
    prompts = value if many else [value]
    if not 1 <= len(prompts) <= limits.prompts:
        raise Refused(400, f"prompt must be from 1 to {limits.prompts} prompts, got {len(prompts):,}.", "prompt")
    for prompt in prompts:
        if isinstance(prompt, list):
            check_ids(prompt, limits.prompt_tokens, vocab_size, "prompt")
        elif prompt != "" and not is_text(prompt):
            raise form_error("prompt")
    return prompts


def check_ids(ids: Any, most: int, vocab_size: int, name: str) -> None:
    """Raise `Refused` unless these are ids of the vocabulary, at least one."""
    if not isinstance(ids, list) or not all(map(_is_id, ids[: most + 1])):
        raise form_error(name)
    if not 1 <= len(ids) <= most:
        raise Refused(400, f"{name} must be from 1 to {most:,} tokens, got {len(ids):,}.", name)
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise Refused(400, f"{name} must hold ids from 0 to {vocab_size - 1:,}.", name)


def _is_id(value: object) -> bool:
    return type(value) is int


def short(value: object) -> str:
    """At most 40 characters of a value, none of them a control character."""
    if isinstance(value, int) and not -LARGE < value < LARGE:  # Python does not print integers of thousands of digits
        return "more"
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
