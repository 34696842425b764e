"""Settings by name: `key=value` applied to a frozen dataclass, with an error that names the key, the type and the fix.

Network configurations and recipes share this, so that `--set` behaves the same everywhere. Values come as text from the
command line or as typed values from TOML; nothing is evaluated.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from runtime.errors import OptionError, UnknownName

Config = TypeVar("Config")


def parse_settings(pairs: tuple[str, ...]) -> dict[str, str]:
    """("epochs=3", "network.dropout=0.1") → {"epochs": "3", "network.dropout": "0.1"}"""
    settings = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key.strip():
            raise OptionError(f"--set {pair!r} is not understood; write --set key=value")
        settings[key.strip()] = value.strip()
    return settings


def apply_settings(config: Config, settings: Mapping[str, Any], *, kind: str = "setting") -> Config:
    """A copy of `config` with `settings` applied; a dotted key reaches into a nested dataclass."""
    types_of = typing.get_type_hints(type(config))
    changes: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}  # applied whole, so that values that only make sense together can be set together
    for key, value in settings.items():
        head, _, rest = key.partition(".")
        if head not in types_of:
            raise UnknownName.of(kind, key, _all_keys(config))
        is_section = dataclasses.is_dataclass(getattr(config, head))
        if is_section and (rest or isinstance(value, Mapping)):
            sections.setdefault(head, {}).update({rest: value} if rest else value)
        elif is_section:
            raise OptionError(f"{kind} {head!r} is a section; set one of its keys: {', '.join(_all_keys(config, head))}")
        elif rest or isinstance(value, Mapping):
            raise OptionError(f"{kind} {head!r} is a single value; it has no {rest or 'section'!r} inside")
        else:
            changes[head] = _convert(key, value, types_of[head])
    for head, inner in sections.items():
        changes[head] = apply_settings(getattr(config, head), inner, kind=kind)
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def changed_settings(before: Any, after: Any) -> dict[str, Any]:
    """The settings in which two configurations of one kind differ, as `after` has them."""
    names = [field.name for field in dataclasses.fields(before)]
    return {name: getattr(after, name) for name in names if getattr(before, name) != getattr(after, name)}


def _all_keys(config: Any, only: str | None = None) -> list[str]:
    keys = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if only not in (None, field.name):
            continue
        keys += [f"{field.name}.{inner}" for inner in _all_keys(value)] if dataclasses.is_dataclass(value) else [field.name]
    return keys


def _convert(key: str, value: Any, kind: Any) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None or value in ("none", ""):
            return None
        return _convert(key, value, next(member for member in inner if member is not type(None)))
    if origin is tuple:
        parts = [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            raise _wrong_type(key, value, f"a list such as {key}=128,64")
        return tuple(_convert(key, part, inner[0]) for part in parts)
    if kind is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if isinstance(value, bool):
            return value
        if str(value).lower() not in words:
            raise _wrong_type(key, value, "true or false")
        return words[str(value).lower()]
    if kind is str:
        if not isinstance(value, str):
            raise _wrong_type(key, value, "text")
        return value
    if isinstance(value, bool) or (kind is int and isinstance(value, float)):
        raise _wrong_type(key, value, "a whole number" if kind is int else "a number")
    try:
        number = kind(value)
        if not math.isfinite(number):
            raise ValueError
        return number
    except (TypeError, ValueError, OverflowError):
        raise _wrong_type(key, value, "a whole number" if kind is int else "a number") from None


def _wrong_type(key: str, value: Any, expected: str) -> OptionError:
    return OptionError(f"setting {key!r} is {value!r}, expected {expected}")
