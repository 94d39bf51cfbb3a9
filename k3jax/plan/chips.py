"""Accelerators: peak, memory and links, from a table that users may edit (`chips.toml`)."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path

from k3jax.config import ConfigError

TABLE = Path(__file__).with_name("chips.toml")


@dataclass(frozen=True)
class Efficiency:
    """Share of a peak that the predicted time counts on, in (0, 1]; `chips.toml` says which are measured."""

    matmul: float
    experts: float
    attention: float
    recurrence: float
    memory: float
    link: float
    ragged: float
    network: float
    usable_memory: float
    """Share of a device's memory that a program can have."""

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not 0 < value <= 1:
                raise ConfigError(f"efficiency.{name} must be in (0, 1], got {value}")


@dataclass(frozen=True)
class Chip:
    """One device and what joins it to others; units as in `chips.toml`."""

    name: str
    bf16_tflops: float
    memory_gib: float
    memory_tb_s: float
    link_gb_s: float
    domain: int
    network_gb_s: float
    efficiency: Efficiency
    compute_capability: str = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and value <= 0:
                raise ConfigError(f"chip {self.name}: {field.name} must be positive, got {value}")

    @property
    def flops(self) -> float:
        return self.bf16_tflops * 1e12

    @property
    def memory_bytes(self) -> float:
        """What a program can have."""
        return self.memory_gib * 2**30 * self.efficiency.usable_memory

    @property
    def memory_bandwidth(self) -> float:
        return self.memory_tb_s * 1e12


def load_chips(path: str | Path | None = None) -> dict[str, Chip]:
    """The table shipped with the package, with the tables of another file over it.

    Raises:
        ConfigError: the file is not there or not TOML, or a table lacks a value or has an unknown or impossible one.
    """
    tables = _read(TABLE)
    for name, values in ({} if path is None else _read(Path(path))).items():
        tables[name] = {**tables.get(name, {}), **values}
    efficiency = _made(Efficiency, "efficiency", tables.pop("efficiency"))
    return {name: _made(Chip, name, {"name": name, "efficiency": efficiency, **t}) for name, t in tables.items()}


def chip(name: str, path: str | Path | None = None) -> Chip:
    """One chip by name.

    Raises:
        ConfigError: there is none of that name; the message lists those that there are.
    """
    chips = load_chips(path)
    if name not in chips:
        raise ConfigError(f"unknown chip {name!r}; there are {', '.join(chips)}, or add one with --chips FILE")
    return chips[name]


def _read(path: Path) -> dict[str, dict]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"chips: cannot read {path}: {error}") from error


def _made[T](cls: type[T], table: str, values: dict) -> T:
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    names = {f.name for f in fields}
    needed = {f.name for f in fields if f.default is dataclasses.MISSING}
    unknown, missing = sorted(set(values) - names), sorted(needed - set(values))
    if unknown or missing:
        wrong = [f"unknown {', '.join(unknown)}"] * bool(unknown) + [f"missing {', '.join(missing)}"] * bool(missing)
        raise ConfigError(f"chips: [{table}] has {' and '.join(wrong)}; its values are {', '.join(sorted(names))}")
    return cls(**values)
