"""Options that are numbers are read as the settings are, with the same errors."""

from __future__ import annotations

from typing import Any, get_args, get_origin

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from ..config.values import alternatives, fits, from_words, type_text, value_text
from ..mistake import Mistake

REGISTRY = ConstructorRegistry()


@REGISTRY.primitive_rule
def number(option: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """The rule for an option of one number or of a list of numbers. The command checks the bounds."""
    many = get_origin(option.type) is tuple and Ellipsis in get_args(option.type)
    each: Any = get_args(option.type)[0] if many else option.type
    kind = next((kind for kind in (int, float) if kind in alternatives(each)), None)
    if kind is None:
        return None
    hint: Any = option.type if many else kind  # None is only a default: it cannot be typed

    def read(words: list[str]) -> Any:
        value = from_words(words, hint)
        values = value if many else [value]
        if not values or any(isinstance(one, str) for one in values):
            raise Mistake(f"it must be {type_text(hint)}, got {value_text(value)}")
        return tuple(values) if many else value

    return PrimitiveConstructorSpec(
        nargs="*" if many else 1,
        metavar="FLOAT" if kind is float else "INT",
        instance_from_str=read,
        is_instance=lambda value: fits(value, option.type),
        str_from_instance=lambda value: [*map(str, value)] if many else [str(value)],
    )
