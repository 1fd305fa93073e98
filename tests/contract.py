"""Moved: `transformer_xl.ops.contract`."""

from transformer_xl.ops.contract import *  # noqa: F403
