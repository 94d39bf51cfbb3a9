"""Configuration files: Python that defines `config = RunConfig(...)`."""

from __future__ import annotations

import dataclasses
import difflib
import re
import runpy
import traceback
from pathlib import Path

import k3jax.config
from k3jax.config import ConfigError, RunConfig, from_dict, to_dict


def load_config(path: str) -> RunConfig:
    """The `config` of a Python file, with every value of the type that its field declares.

    Raises:
        ConfigError: no such file, an error in it (which line), no `RunConfig` of that name, or a value of another type.
    """
    if not Path(path).is_file():
        raise ConfigError(f"no configuration file {path}; the first argument is a Python file such as configs/nano.py")
    try:
        config = runpy.run_path(path).get("config")
    except ConfigError:
        raise
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        where = f", line {lines[-1]}" if lines else ""
        raise ConfigError(f"{path}{where}: {type(error).__name__}: {error}{_nearest_field(error)}") from error
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{path} must define `config = RunConfig(...)`")
    return from_dict(RunConfig, to_dict(config))


def _nearest_field(error: Exception) -> str:
    """What a misspelt field of a configuration class was probably meant to be."""
    call = re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    owner = getattr(k3jax.config, call[1], None) if call else None
    if call is None or not dataclasses.is_dataclass(owner):
        return ""
    near = difflib.get_close_matches(call[2], [f.name for f in dataclasses.fields(owner)], n=1)
    return f"; did you mean {near[0]}?" if near else ""
