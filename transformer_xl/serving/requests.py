"""What clients may ask for, in the form of OpenAI's API. Pydantic checks the fields."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PROMPTS = 64
"""Maximum number of prompts of a request."""

Token = Annotated[int, Field(ge=0, lt=1 << 32)]
Ids = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Prompts = Annotated[list[str | Ids], Field(min_length=1, max_length=PROMPTS, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Field(max_length=16, fail_fast=True)]
Key = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float | None, Field(ge=0, le=0, description="left out or 0, because penalties are not supported")]


class Refused(Exception):
    """An answer that is an error: its status, a sentence, and the field that is wrong."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status: int = status
        self.message: str = message
        self.param: str | None = param
        self.code: str | None = code

    def to_json(self) -> dict[str, object]:
        """The error in OpenAI's form."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest sizes that a request may have."""

    prompt_tokens: int = 1 << 17
    """Of all prompts."""
    max_tokens: int = 1 << 14
    values: int = 1 << 19
    """Of an answer; see `Completion.values`."""


class Completion(BaseModel):
    """OpenAI's request for completions; `top_k`, `mem_len`, `previous_response_id` and `store` are ours."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    prompt: Annotated[
        str | Ids | Prompts,
        Field(description=f"a text, a list of token ids, or a list of either with at most {PROMPTS}"),
    ] = ""
    """A text begins after a line end; ids are read as they are."""
    max_tokens: Annotated[int, Field(ge=0)] = 16
    n: Annotated[int, Field(ge=1, le=16)] = 1
    temperature: Annotated[float, Field(ge=0, le=1e4)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=1 << 32)] = 0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[
        Stop | Stops | None, Field(description="a text of 1 to 256 characters, or a list of at most 16 such texts")
    ] = None
    stream: bool = False
    stream_options: Annotated[
        dict[Literal["include_usage"], bool | None] | None,
        Field(description='left out or {"include_usage": true}, or false'),
    ] = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    mem_len: Annotated[int, Field(ge=1)] | None = None
    """Tokens before it that each token sees; by default as the model was trained."""
    previous_response_id: str | None = None
    """Go on after the text of this response, or of one of its choices, without reading it again."""
    store: bool = True
    """Keep what was read and written, so that `previous_response_id` can name it."""
    logit_bias: Annotated[
        dict[Key, Bias] | None,
        Field(max_length=300, description="at most 300 token ids as decimal numbers, each with one from -100 to 100"),
    ] = None
    """What is added to the log-probabilities of these tokens."""
    user: str | None = None
    best_of: Annotated[Literal[1] | None, Field(description="left out or 1; for several choices give n")] = None
    suffix: Annotated[Literal[""] | None, Field(description="left out, because insertion is not supported")] = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: object) -> object:
        """A field that is null has its default value, as in OpenAI's interface; a prompt must be there. Of unknown
        fields the first is enough for a refusal, and of an object 301 entries: pydantic would list all mistakes in it,
        a second for a megabyte."""
        if not isinstance(fields, dict):
            return fields
        unknown = (name for name in fields if name not in cls.model_fields)
        named = [name for name in cls.model_fields if name in fields and (name == "prompt" or fields[name] is not None)]
        given = ((name, fields[name]) for name in (*named, *islice(unknown, 1)))
        return {name: dict(islice(each.items(), 301)) if isinstance(each, dict) else each for name, each in given}

    def values(self, prompts: int, read: int) -> int:
        """The number of values that an answer can hold: tokens, each with its log-probability and the likeliest.

        Args:
            read: tokens of all prompts.
        """
        return (prompts * self.max_tokens + read * self.echo) * self.n * (1 + (self.logprobs or 0))

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, also a single one, as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [each for each in self.prompt if isinstance(each, int)]
        return [ids] if ids else [each for each in self.prompt if not isinstance(each, int)]


class Tokenize(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True)
    prompt: str


class Detokenize(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True)
    tokens: Annotated[list[Token], Field(fail_fast=True)]
