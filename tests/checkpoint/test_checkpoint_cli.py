"""`python -m k3jax.checkpoint`: in, checked, and out again."""

import pytest
from released import PACKED, assert_same_tensors, read

import k3jax
from k3jax.checkpoint.__main__ import export_run, import_directory, inspect_directory
from k3jax.checkpoint.store import CheckpointError
from k3jax.config import MeshConfig


def test_a_directory_becomes_a_run_and_a_directory_again(tmp_path, capsys):
    inspect_directory(str(PACKED))
    assert "16 experts, MXFP4" in capsys.readouterr().out
    run, out = str(tmp_path / "run"), tmp_path / "out"
    import_directory(str(PACKED), run, mesh=MeshConfig(expert=2))
    loaded = k3jax.load(run)
    assert loaded.config.model.param_dtype == "bfloat16"
    assert loaded.router_bias.any()
    with pytest.raises(CheckpointError, match="already holds"):
        import_directory(str(PACKED), run)
    export_run(run, str(out), like=str(PACKED))
    assert_same_tensors(read(out), read(PACKED))
