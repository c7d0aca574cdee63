"""Reading compiled programs: HLO text and thunk lists, by hand.

Run: .venv/bin/python -m pytest tests/plan/test_compiled.py
"""

import pytest

from mimo_jax.plan import hlo, thunks
from mimo_jax.plan.checks import failed, promises
from mimo_jax.plan.worker import NO_LAUNCHES, ProgramFacts

# A program of one device as XLA prints it, cut down to what is read: a loop without a known count,
# a gather of expert rows, an update in place, an all-reduce inside a fusion, a copied stack.
STEP = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias), \
{1}: (2, {}, must-alias) }, entry_computation_layout={(f32[8,4]{1,0})->f32[8,4]{1,0}}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused_gather (p0: u8[384,100], p1: s32[64]) -> u8[64,100] {
  %p0 = u8[384,100]{1,0} parameter(0)
  %p1 = s32[64]{0} parameter(1)
  ROOT %rows = u8[64,100]{1,0} gather(%p0, %p1), slice_sizes={1,100}
}

%fused_write (p0: f32[1000,4], p1: f32[8,4], p2: s32[]) -> f32[1000,4] {
  %p0 = f32[1000,4]{1,0} parameter(0)
  %p1 = f32[8,4]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %new = f32[1000,4]{1,0} dynamic-update-slice(%p0, %p1, %p2, %zero)
}

%fused_sum (p0: bf16[8,6144]) -> bf16[8,6144] {
  %p0 = bf16[8,6144]{1,0} parameter(0)
  ROOT %all = bf16[8,6144]{1,0} all-reduce(%p0), replica_groups={{0,1}}, to_apply=%add
}

%fused_move (p0: f32[3,1000,1000]) -> f32[1000,1000] {
  %p0 = f32[3,1000,1000]{2,1,0} parameter(0)
  %one = f32[1,1000,1000]{2,1,0} slice(%p0), slice={[1:2], [0:1000], [0:1000]}
  ROOT %flat = f32[1000,1000]{1,0} bitcast(%one)
}

%inner (c: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %c = (s32[], f32[8,4]{1,0}) parameter(0)
  %part = f32[8,4]{1,0} get-tuple-element(%c), index=1
  %twice = f32[8,4]{1,0} add(%part, %part)
  %n = s32[] get-tuple-element(%c), index=0
  ROOT %back = (s32[], f32[8,4]{1,0}) tuple(%n, %twice)
}

%inner_open (c: (s32[], f32[8,4])) -> pred[] {
  %c = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%body (c: (u8[384,100], f32[1000,4], f32[3,1000,1000])) -> (u8[384,100]) {
  %c = (u8[384,100]{1,0}, f32[1000,4]{1,0}, f32[3,1000,1000]{2,1,0}) parameter(0)
  %ids = s32[64]{0} constant({...})
  %stack = u8[384,100]{1,0} get-tuple-element(%c), index=0
  %gather_fusion.1 = u8[64,100]{1,0} fusion(%stack, %ids), kind=kLoop, calls=%fused_gather
  %gather_fusion.2 = u8[64,100]{1,0} fusion(%c#0, %ids), kind=kLoop, calls=%fused_gather
  %write_fusion = f32[1000,4]{1,0} fusion(%c#1, %new, %at), kind=kLoop, calls=%fused_write
  %x = bf16[8,6144]{1,0} constant({...})
  %fusion-start = ((bf16[8,6144]{1,0}), bf16[8,6144]{1,0}) fusion-start(%x), kind=kCustom, \
calls=%fused_sum
  %fusion-done = bf16[8,6144]{1,0} fusion-done(%fusion-start), kind=kCustom, calls=%fused_sum
  %move_fusion = f32[1000,1000]{1,0} fusion(%c#2), kind=kLoop, calls=%fused_move
  %tuple = (s32[], f32[8,4]{1,0}) tuple(%n, %y)
  %while.1 = (s32[], f32[8,4]{1,0}) while(%tuple), condition=%inner_open, body=%inner, \
backend_config={"known_trip_count":{"n":"5"}}
  ROOT %out = (u8[384,100]{1,0}) tuple(%stack)
}

%open (c: (u8[384,100])) -> pred[] {
  %c = (u8[384,100]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (a: f32[8,4], b: u8[384,100], c: f32[1000,4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = u8[384,100]{1,0} parameter(1)
  %c = f32[1000,4]{1,0} parameter(2)
  %gathered = f32[16,4]{1,0} all-gather(%a), dimensions={0}
  %copy.9 = f32[3000000]{0} copy(%a)
  %state = (u8[384,100]{1,0}) tuple(%b)
  %while.2 = (u8[384,100]{1,0}) while(%state), condition=%open, body=%body
  ROOT %r = f32[8,4]{1,0} add(%a, %a)
}
"""


@pytest.fixture(scope="module")
def module() -> hlo.Module:
    return hlo.parse(STEP)


def test_sizes_of_types():
    assert hlo.shape_bytes("(bf16[8,6144]{1,0}, s32[], pred[3])") == 98304 + 4 + 3
    assert hlo.shape_bytes("u8[384,256,3072]{2,1,0}") == 301_989_888
    assert hlo.shape_bytes("token[]") == 0


def test_the_frame_of_a_module(module):
    assert module.entry == "main"
    assert module.aliased_parameters == (0, 2)
    assert hlo.parameter_bytes(module) == {0: 128, 1: 38400, 2: 16000}
    assert hlo.has_step_loop(module)
    # Without the loop over steps only the counted one is left.
    assert not hlo.has_step_loop(hlo.parse(STEP.replace("%while.2 =", "%gone =").replace(
        "while(%state), condition=%open, body=%body", "tuple(%b)")))  # fmt: skip


def test_collectives_are_found_inside_fusions(module):
    found = hlo.collectives(module)
    assert [(one.kind, one.num_bytes, one.loop_depth) for one in found] == [
        ("all-gather", 256, 0),
        ("all-reduce", 98304, 1),
    ]


def test_copies_are_what_moves_and_computes_nothing(module):
    found = hlo.large_copies(module, min_bytes=4_000_000)
    assert [(copy.name, copy.opcode, copy.num_bytes, copy.loop_depth) for copy in found] == [
        ("copy.9", "copy", 12_000_000, 0),
        ("move_fusion", "slice", 4_000_000, 1),
    ]
    assert [copy.name for copy in hlo.large_copies(module)] == ["copy.9"]


def test_bytes_of_a_step(module):
    found = {move.name: move for move in hlo.moves(module, in_loop=True)}
    # Two gathers: 64 rows of 100 B read and written and 256 B of ids each, not the whole stack.
    assert found["gather_fusion"].count == 2
    assert found["gather_fusion"].num_bytes == 2 * (6400 + 6400 + 256)
    # In place: the block of 128 B read and written, and the index; not 16,000 B.
    assert found["write_fusion"].num_bytes == 128 + 128 + 4
    # A slice reads what it picks.
    assert found["move_fusion"].num_bytes == 8_000_000
    assert found["fusion-start"].num_bytes >= 2 * 98304
    # Five times through the counted loop.
    assert found["twice"].count == 5
    assert found["twice"].num_bytes == 5 * 3 * 128
    assert "copy" not in found
    assert "copy" in {move.name for move in hlo.moves(module, in_loop=False)}


KERNELS = """\
HloModule picks

ENTRY %main (x: bf16[8,6144]) -> bf16[8,256] {
  %x = bf16[8,6144]{1,0} parameter(0)
  %tiles = s32[1,384,4,24,64,32]{5,4,3,2,1,0} parameter(1)
  %scales = u8[1,384,4,192,64]{4,3,2,1,0} parameter(2)
  %memory = bf16[1,1,144,192]{3,2,1,0} parameter(3)
  %mpmd_map.3 = (bf16[8,256]{1,0}, bf16[1,1,144,192]{3,2,1,0}) \
custom-call(%x, %tiles, %scales, %memory), custom_call_target="mosaic_gpu_v2", \
output_to_operand_aliasing={{1}: (3, {})}, api_version=API_VERSION_TYPED_FFI, \
metadata={op_name="jit(f)/jit(up)/body/mpmd_map"}
  ROOT %out = bf16[8,256]{1,0} get-tuple-element(%mpmd_map.3), index=0
}
"""


def test_kernels_pick_from_stacks_and_write_in_place():
    module = hlo.parse(KERNELS)
    move = hlo.moves(module, in_loop=False)[0]
    assert move.name == "up"
    # Tokens in and out; the memory is written in place and the stacks are told apart.
    assert move.num_bytes == 2 * 8 * 6144 + 2 * 8 * 256
    stacks = 384 * 4 * (24 * 64 * 32 * 4 + 192 * 64)
    assert hlo.picked_from_bytes(module, in_loop=False) == stacks


THUNKS = """\
000: kCommandBuffer [source | sink]
    001: kCopy         [source        | next=002 (1)] kCopy
    002: kWhile        [prev=001 (1) | sink        ]
    condition:
        003: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
      body:
        004: kCustomKernel [source       | next=005 (1)] gemm_fusion_dot grid: [128, 1, 1]
        005: kAsyncStart   [prev=006 (1) | next=010 (2)] stream=computation_stream[0], async_id=7
            006: kCollectiveKernel [source | sink] kCollectiveKernel
        007: kAsyncDone    [source       | sink        ] async_id=7
        008: kCustomCall   [source | sink] mosaic_gpu_v2
        009: kWhile [source | sink]
        condition:
            010: kCustomKernel [source | sink] compare grid: [1, 1, 1]
          body:
            011: kCustomKernel [source | sink] add grid: [1, 1, 1]
"""


def test_a_loop_in_one_graph():
    shape = thunks.describe(thunks.parse(THUNKS), has_step_loop=True)
    assert shape.top_level == {"kCommandBuffer": 1}
    assert shape.num_command_buffers == 1
    assert shape.is_one_graph
    # A step: its condition, two kernels' worth of products and calls, one collective, and the
    # inner loop once.
    assert shape.launches == {"kCustomKernel": 4, "kCollectiveKernel": 1, "kCustomCall": 1}
    assert shape.num_inner_loops == 1
    everything = thunks.describe(thunks.parse(THUNKS), has_step_loop=False)
    assert everything.launches["kCopy"] == 1
    assert everything.num_inner_loops == 2


def test_a_loop_that_the_host_runs():
    lines = THUNKS.splitlines()[1:]
    outside = "\n".join(line.removeprefix("    ") for line in lines)
    shape = thunks.describe(thunks.parse(outside), has_step_loop=True)
    assert shape.top_level == {"kCopy": 1, "kWhile": 1}
    assert not shape.is_one_graph
    # A graph at top level that does not hold the loop, as where XLA runs the while on the host.
    unrolled = "000: kCommandBuffer [source | sink]\n    001: kCustomKernel [source | sink] add\n"
    assert not thunks.describe(thunks.parse(unrolled), has_step_loop=True).is_one_graph
    beside = thunks.parse(THUNKS + "012: kAllReduce [source | sink] kAllReduce\n")
    assert not thunks.describe(beside, has_step_loop=True).is_one_graph


def test_the_list_after_the_passes_is_the_one_that_counts(tmp_path):
    assert thunks.read_dump(tmp_path) is None
    (tmp_path / "a.thunk_sequence.txt").write_text(THUNKS)
    (tmp_path / "b.thunk_sequence.txt").write_text("000: kCopy [source | sink] kCopy\n")
    first = thunks.read_dump(tmp_path)
    assert first is not None
    assert first[0].kind == "kCommandBuffer"
    after = tmp_path / "a.thunk_sequence_after_thunk_passes.txt"
    after.write_text("000: kMemset [source | sink] kMemset\n")
    second = thunks.read_dump(tmp_path)
    assert second is not None
    assert [thunk.kind for thunk in second] == ["kMemset"]


def facts(**changes) -> ProgramFacts:
    values = NO_LAUNCHES | {
        "argument_bytes": 100, "alias_bytes": 60, "temp_bytes": 5, "peak_bytes": 105,
        "is_step_loop": True, "collectives": {"all-reduce": (150, 9)}, "large_copies": [],
        "num_aliased": 3, "moved_bytes": 7, "picked_from_bytes": 0, "moves": [],
        "lower_s": 1.0, "compile_s": 2.0, "host_peak_bytes": 3, "why_no_kernels": None,
    }  # fmt: skip
    return ProgramFacts(**(values | changes))


def test_promises_that_are_broken_are_named():
    def broken(**changes):
        return failed(promises(facts(**changes), num_layers=75, num_devices=8, cache_bytes=60))

    assert broken() is None
    too_many = broken(collectives={"all-reduce": (157, 9)})
    assert too_many == "not as promised: two all-reduces per layer"
    gathered = {"all-reduce": (150, 9), "all-gather": (1, 9)}
    assert broken(collectives=gathered) == "not as promised: nothing is gathered"
    assert "written in place" in str(broken(alias_bytes=59))
    copy = hlo.Copy("copy.1", "copy", 9_000_000, 1)
    assert "no copy over 8 MB" in str(broken(large_copies=[copy]))
    assert broken(large_copies=[copy._replace(loop_depth=0)]) is None
    on_gpu = {"launches": {}, "top_level": {"kWhile": 1}, "num_command_buffers": 19}
    assert "one command buffer" in str(broken(is_one_graph=False, **on_gpu))
    assert broken(is_one_graph=True, **on_gpu) is None
