"""Learning to see from nothing, by the loss of the text alone."""

import dataclasses

import jax
import numpy as np
import pytest
from micro import micro_config, micro_model
from processes import train_from_nothing

from benchmarks.digits import measure
from k3jax.config import ImagesConfig, VisionConfig
from k3jax.generate import load
from k3jax.sharding import make_mesh
from k3jax.train import loop


@pytest.mark.slow
def test_nano_reads_digits_that_it_has_never_seen(tmp_path):
    """Half of the digits and a tenth of the lines of three; without pixels no more than by chance.

    The time limit of eight minutes holds on an idle machine with two cores; the figure is printed.
    """
    train_from_nothing("nano_vision", tmp_path, timeout=2400)
    loaded = load(tmp_path / "run")
    seen, blind = (measure(loaded, count=500, blank=blank) for blank in (False, True))
    print(f"with pixels {seen}, without {blind}")
    assert seen.digits >= 0.5
    assert seen.lines >= 0.1
    assert blind.digits <= 0.15
    assert blind.lines <= 0.01


def test_a_tower_learns_to_see_beside_text(text_folder, tmp_path):
    """A model too small to be good at it, on single digits: three times chance; blind no better than chance."""
    model = micro_model(
        hidden_size=64,
        vision=VisionConfig(
            hidden_size=32, num_layers=1, num_heads=2, head_dim=16, mlp_size=64, patch_size=8, position_grid=(2, 8)
        ),
    )
    images = ImagesConfig(source="digits", share=0.75, patches=64)
    config = micro_config(
        text_folder,
        tmp_path / "run",
        model=model,
        data={"sequence_length": 64, "batch_size": 8, "images": images},
        train={"steps": 100, "checkpoint_interval": 100, "log_interval": 50},
        optimizer={"learning_rate": 5e-3},
    )
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        loop.train(config, mesh)
        loaded = load(config.run_dir)
        seen, blind = (measure(loaded, count=200, digits=1, blank=blank) for blank in (False, True))
    print(f"with pixels {seen}, without {blind}")
    assert seen.digits >= 0.3
    assert blind.digits <= 0.2


@pytest.mark.slow  # that the data do is tested with the loader
def test_a_run_with_images_resumes_bit_for_bit(text_folder, tmp_path):
    """Two steps and three more are five."""
    images = ImagesConfig(source="digits", share=0.5, patches=64)
    tower = VisionConfig(
        hidden_size=16, num_layers=1, num_heads=2, head_dim=8, mlp_size=24, patch_size=8, position_grid=(2, 8)
    )
    whole = micro_config(
        text_folder,
        tmp_path / "whole",
        model=micro_model(vision=tower),
        data={"sequence_length": 64, "images": images},
        train={"steps": 5, "checkpoint_interval": 2},
    )
    cut = dataclasses.replace(whole, run_dir=str(tmp_path / "cut"))
    mesh = make_mesh(whole.mesh)
    with jax.set_mesh(mesh):
        loop.train(whole, mesh)
        with pytest.MonkeyPatch.context() as patch:
            stop = loop.StopRequest()
            patch.setattr(loop, "StopRequest", lambda: stop)
            patch.setattr(
                loop._Run, "_report", lambda self, step, *_: setattr(stop, "signal", "SIGTERM") if step > 1 else None
            )
            loop.train(cut, mesh)
        assert load(cut.run_dir).step < 5
        loop.train(cut, mesh)
        ours, theirs = load(cut.run_dir), load(whole.run_dir)
    assert ours.step == theirs.step == 5
    jax.tree.map(np.testing.assert_array_equal, ours.model, theirs.model)
