"""What every configuration class checks itself with."""

from __future__ import annotations

from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be honoured; the message says which field, why, and what would be legal."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def require_positive(obj: Any, *names: str) -> None:
    for name in names:
        value = getattr(obj, name)
        positive = isinstance(value, (int, float)) and value > 0
        require(positive, f"{type(obj).__name__}.{name} must be positive, got {value!r}")


def require_address(name: str, value: str) -> None:
    host, _, port = value.rpartition(":")
    legal = bool(host) and port.isdigit() and 0 < int(port) < 1 << 16
    require(legal, f"{name} must be HOST:PORT, got {value!r}")
