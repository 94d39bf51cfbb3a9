"""How the benchmark of the training step attributes device time."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
train_step = pytest.importorskip("benchmarks.train_step")

HLO = """
%fused_computation.1 (p: f32[2]) -> f32[2] {
  %p = f32[2] parameter(0)
  %a = f32[2] add(%p, %p), metadata={op_name="jit(train_step)/optimizer/add"}
  ROOT %b = f32[2] multiply(%a, %p), metadata={op_name="jit(train_step)/optimizer/add"}
}

ENTRY %main.2 (x: f32[2]) -> f32[2] {
  %x = f32[2] parameter(0)
  %loop_fusion = f32[2] fusion(%x), kind=kLoop, calls=%fused_computation.1
  ROOT %dot.3 = f32[2] custom-call(%loop_fusion), metadata={op_name="jit(train_step)/jvp(kda)/dot_general"}
}
"""


def test_a_fusion_without_a_path_has_that_of_what_is_in_it():
    paths = train_step.op_paths(HLO)
    assert paths["loop_fusion"] == "jit(train_step)/optimizer/add"
    assert paths["dot.3"] == "jit(train_step)/jvp(kda)/dot_general"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("jit(train_step)/jvp(kda)/dot_general", ("KDA", "forward")),
        ("jit(train_step)/jvp()/while/body/kda/attn_res/mul", ("AttnRes", "forward")),
        ("jit(train_step)/transpose(jvp())/checkpoint/moe/mpmd_map", ("MoE", "backward")),
        ("jit(train_step)/transpose(jvp())/checkpoint/rematted_computation/moe/mul", ("MoE", "again")),
        ("jit(train_step)/jvp(moe)/balancing/scatter-add", ("balancing", "forward")),
        ("jit(train_step)/optimizer/add", ("optimizer", "forward")),
        ("jit(train_step)/jvp()/while/body/dynamic_slice", ("rest", "forward")),
    ],
)
def test_an_operation_belongs_to_its_innermost_component(path, expected):
    assert train_step.component_and_pass(path) == expected
