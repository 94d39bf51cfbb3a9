"""XLA's own numbers of the real step beside the estimate, and how they are read off a program."""

import dataclasses

import pytest
from micro import micro_config, micro_model

import k3jax.plan.compile as compiled
from k3jax.config import ConfigError, KDAConfig, MeshConfig, MoEConfig, RunConfig
from k3jax.plan.__main__ import Arguments, fake_devices
from k3jax.plan.compile import compile_step, fitted_to
from k3jax.plan.hlo import read_program
from k3jax.plan.report import on_mesh
from k3jax.train.config_file import load_config

PROGRAM = """HloModule test

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}

%body (state: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %x = f32[8,4]{1,0} get-tuple-element(%state), index=1
  %w = f32[4,4]{1,0} constant({...})
  %y = f32[8,4]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %r = f32[8,4]{1,0} all-reduce(%y), replica_groups=mesh['data'=4,'tensor'=1] {'data'}, to_apply=%sum
  %same = f32[8,4]{1,0} all-reduce(%r), replica_groups=mesh['data'=4,'tensor'=1] {'tensor'}, to_apply=%sum
  ROOT %next = (s32[], f32[8,4]) tuple(%i, %same)
}

%condition (state: (s32[], f32[8,4])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: f32[2,4]) -> f32[8,4] {
  %p = f32[2,4]{1,0} parameter(0)
  %g = f32[8,4]{1,0} all-gather(%p), replica_groups=[1,4]<=[4], dimensions={0}
  %s = (f32[2,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%p), replica_groups={{0,1,2,3}}, dimensions={0}
  %scalar = f32[] all-reduce(%one), replica_groups={{0,1,2,3}}, to_apply=%sum
  %small = bf16[2,4]{1,0} reduce-scatter(%g), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%sum
  %w = (s32[], f32[8,4]) while(%t), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %out = f32[8,4]{1,0} get-tuple-element(%w), index=1
}
"""


def test_loops_count_as_often_as_they_run_and_groups_of_one_device_not_at_all():
    program = read_program(PROGRAM)
    assert program.bytes == {"all-reduce": 3 * 128, "all-gather": 2 * 128, "reduce-scatter": 128}
    assert program.counts == {"all-reduce": 3, "all-gather": 2, "reduce-scatter": 1}
    assert program.flops == 3 * 2 * 8 * 4 * 4


def test_a_large_mesh_is_compiled_with_the_shapes_of_its_devices():
    config = load_config("configs/k3.py")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=1024))
    small, changes = fitted_to(on_mesh(config, MeshConfig(data=16, expert=32)), 64, layers=13)
    assert (small.mesh.data, small.mesh.expert, small.data.batch_size) == (2, 32, 128)
    assert small.model.moe == config.model.moe
    assert (small.model.num_layers, small.model.mla_layers) == (13, (3, 7, 11))
    assert [change.split()[0] for change in changes] == ["data", "layers"]
    small, changes = fitted_to(on_mesh(config, MeshConfig(expert=128)), 64)
    assert (small.mesh.expert, small.model.moe.num_experts, small.data.batch_size) == (64, 448, 512)
    assert fitted_to(on_mesh(config, MeshConfig(data=8)), 64)[1] == []
    with pytest.raises(ConfigError, match="= 128 alone is more than 64"):
        fitted_to(dataclasses.replace(config, mesh=MeshConfig(context=128)), 64)


def test_the_command_line_asks_for_as_many_devices_as_it_compiles_for():
    config = load_config("configs/k3.py")
    assert fake_devices(config, Arguments(mesh="data=16,expert=32")) == 64
    assert fake_devices(config, Arguments(mesh="data=6", batch=12)) == 6


def config_on(mesh: MeshConfig) -> RunConfig:
    """Float32, because XLA for CPUs reduces bfloat16 in float32."""
    model = micro_model(
        num_layers=3,
        mla_layers=(2,),
        num_dense_layers=0,
        kda=KDAConfig(num_heads=8, head_dim=16, chunk_size=16),
        moe=MoEConfig(num_experts=8, experts_per_token=2, expert_size=16, latent_size=16, qb_bins=100),
    )
    return micro_config("none", "none", model=model, train={"remat": "layer"}, data={"batch_size": 8}, mesh=mesh)


def test_a_mesh_that_the_trainer_lacks_is_refused_before_anything_is_traced(monkeypatch):
    def refuse(mesh):
        raise ConfigError("mesh axes tensor must be 1")

    monkeypatch.setattr(compiled, "make_mesh", refuse)
    monkeypatch.setattr(compiled, "abstract_state", None)
    with pytest.raises(ConfigError, match="tensor must be 1"):
        compile_step(config_on(MeshConfig()), MeshConfig(tensor=2))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MeshConfig(data=8), MeshConfig(data=8, fsdp=True)], ids=["zero-1", "fsdp"])
def test_collectives_of_the_compiled_step_are_those_predicted(mesh):
    result = compile_step(config_on(mesh))
    predicted: dict[str, float] = {}
    for c in result.plan.traffic[0]:
        predicted[c.op] = predicted.get(c.op, 0.0) + c.total
    found = result.program.bytes
    assert result.changes == []
    assert found["all-to-all"] == predicted["all-to-all"]
    assert found["all-gather"] == pytest.approx(predicted["all-gather"], rel=0.005)
    # for CPUs XLA leaves a reduction that is then cut as an all-reduce
    reduced = predicted["all-reduce"] + predicted.get("reduce-scatter", 0.0)
    assert found["all-reduce"] + found.get("reduce-scatter", 0) == pytest.approx(reduced, rel=0.01)
    assert result.arguments == pytest.approx(result.plan.memory.arguments, rel=0.01)  # and the batch
    assert any("all-gather" in line for line in result.lines())
