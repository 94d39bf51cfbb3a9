"""Configurations as plain JSON types and back, and what differs between two."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from typing import Any, Literal

from k3jax.config.checks import ConfigError, require
from k3jax.config.run import RunConfig


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as plain JSON types (tuples become lists)."""
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def from_dict[T](cls: type[T], values: dict[str, Any], where: str = "") -> T:
    """Inverse of `to_dict`.

    Raises:
        ConfigError: an unknown name (with the nearest valid one), a missing field or a wrong type.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            raise ConfigError(
                f"unknown config field {where}{name}"
                + (f"; did you mean {where}{near[0]}?" if near else f"; fields are {', '.join(fields)}")
            )
    missing = [
        n
        for n, f in fields.items()
        if n not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    require(not missing, f"config fields missing: {', '.join(where + m for m in missing)}")
    return cls(**{name: _typed(hints[name], value, where + name) for name, value in values.items()})


def _typed(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        require(isinstance(value, dict), f"{where} must be a mapping of fields, got {value!r}")
        return from_dict(typing.cast(type, hint), value, where + ".")
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        for option in (a for a in args if a is not type(None)):
            try:
                return _typed(option, value, where)
            except ConfigError:
                continue
        raise ConfigError(f"{where} must be {hint}, got {value!r}")
    if origin is tuple:
        require(isinstance(value, (list, tuple)), f"{where} must be a list, got {value!r}")
        return tuple(_typed(args[0], v, where) for v in value)
    if origin is dict:
        require(isinstance(value, dict), f"{where} must be a mapping, got {value!r}")
        return {_typed(args[0], k, where): _typed(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin is Literal:
        require(value in args, f"{where} must be one of {', '.join(map(repr, args))}, got {value!r}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    require(
        isinstance(value, hint) and not (hint is int and isinstance(value, bool)),
        f"{where} must be {hint.__name__}, got {value!r}",
    )
    return value


def diff(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Fields that differ, by dotted name: `{"optimizer.learning_rate": (old, new)}`."""
    return diff_dicts(to_dict(old), to_dict(new))


def diff_dicts(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """`diff` of two configurations in the form of `to_dict`; a field that one of them lacks counts as None."""

    def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, value in values.items():
            out.update(flatten(value, prefix + name + ".") if isinstance(value, dict) else {prefix + name: value})
        return out

    a, b = flatten(old), flatten(new)
    return {name: (a.get(name), b.get(name)) for name in sorted(a | b) if a.get(name) != b.get(name)}
