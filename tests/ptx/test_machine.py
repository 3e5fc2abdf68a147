"""The interpreter of PTX itself: results of instructions, and proof that each of its checks can fail."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tools.amdgcn.checks import Fault, Unsupported
from tools.ptx.barriers import Descriptor
from tools.ptx.machine import ORDERS, Program, launch

Array = npt.NDArray[Any]
TEXT = """
.version 8.7
.target sm_90a
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
	.param .align 64 .b8 kernel_param_0[128],
	.param .u64 .ptr .global .align 1 kernel_param_1,
	.param .u64 .ptr .global .align 1 kernel_param_2
)
.reqntid {threads}
{{
	.reg .pred 	%p<8>;
	.reg .b16 	%rs<8>;
	.reg .b32 	%r<80>;
	.reg .b64 	%rd<16>;
	ld.param.b64 %rd1, [kernel_param_1];
	ld.param.b64 %rd2, [kernel_param_2];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd3, %r1, 4;
	add.s64 %rd4, %rd1, %rd3;
	add.s64 %rd5, %rd2, %rd3;
{body}
	ret;
}}
"""
# One thread makes the barrier at 0 of shared memory, and asks for the box at 1024.
BOX = """
setp.eq.b32 %p1, %r1, 0;
mov.b32 %r20, global_smem;
@%p1 mbarrier.init.shared::cta.b64 [%r20], 1;
bar.sync 0;
mov.b64 %rd10, kernel_param_0;
add.s32 %r21, %r20, 1024;
mov.b32 %r22, 0;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r20], {bytes};
@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
    [%r21], [%rd10, {{%r22, %r22}}], [%r20];
"""
WAIT = """
{
.reg .pred complete;
waitLoop:
mbarrier.try_wait.parity.shared.b64 complete, [%r20], 0;
@!complete bra.uni waitLoop;
}
"""


def run(
    body: str,
    first: Array,
    second: Array,
    threads: int = 32,
    shared: int = 0,
    boxes: Descriptor | None = None,
    read: Array | None = None,
    order: str = "late",
) -> None:
    """Run `body` with the addresses of each thread's word of `first` and `second` in %rd4 and %rd5."""
    program = Program(TEXT.format(threads=threads, body=body))
    assert not program.unknown
    given = [each for each in (first, second, read) if each is not None]
    arguments = bytes(128) + struct.pack("<2Q", first.ctypes.data, second.ctypes.data)
    regions = [(each.ctypes.data, each.nbytes) for each in given]
    launch(program, (1, 1, 1), arguments, {} if boxes is None else {0: boxes}, regions, shared, order)


def computed(instruction: str, *operands: Array) -> Array:
    """Return %r10 of each lane after `instruction`; the operands are in %r2, %r3 and %r4."""
    given = np.stack([np.resize(each, 32).view(np.uint32) for each in operands])
    result = np.zeros(32, np.uint32)
    loads = "".join(f"ld.global.b32 %r{2 + place}, [%rd4+{128 * place}];" for place in range(len(operands)))
    run(f"{loads}\n{instruction}\nst.global.b32 [%rd5], %r10;", given, result)
    return result


def test_memory_outside_is_refused() -> None:
    numbers, result = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    run("ld.global.b32 %r2, [%rd4]; st.global.b32 [%rd5], %r2;", numbers, result)
    assert (result == numbers).all()
    for wrong in ("ld.global.b32 %r2, [%rd4+4];", "st.global.b32 [%rd5+-4], %r1;"):
        with pytest.raises(Fault, match="outside the arguments"):
            run(wrong, numbers, result)
    with pytest.raises(Fault, match="unaligned load"):
        run("ld.global.b16 %rs1, [%rd4+1];", numbers, result)
    with pytest.raises(Fault, match="outside the shared memory"):
        run("st.shared.b32 [global_smem+64], %r1;", numbers, result, shared=64)
    with pytest.raises(Fault, match="nothing has written"):
        run("ld.shared.b32 %r2, [global_smem+4];", numbers, result, shared=64)


def test_an_unknown_instruction_is_refused_once_it_is_executed() -> None:
    program = Program(TEXT.format(threads=32, body="@%p1 tcgen05.shift.cta_group::1.down [%r2];"))
    assert len(program.unknown) == 1
    arguments = bytes(144)
    with pytest.raises(Unsupported, match="tcgen05"):
        launch(program, (1, 1, 1), arguments, {}, [], 0)


def test_text_that_was_cut_off_is_refused() -> None:
    whole = TEXT.format(threads=32, body="mov.b32 %r2, 0;")
    for end, problem in (
        (0, "0 kernels"),
        (whole.index("%tid"), "without an end"),
        (whole.rindex("}"), "without an end"),
    ):
        with pytest.raises(Unsupported, match=problem):
            Program(whole[:end])


def test_bits_and_bytes() -> None:
    a, b = np.full(1, 0x33221100, np.uint32), np.full(1, 0x776655C4, np.uint32)
    assert computed("prmt.b32 %r10, %r2, %r3, 0x7430;", a, b)[0] == 0x77C43300
    assert computed("prmt.b32 %r10, %r2, %r3, 0xc840;", a, b)[0] == 0xFF00C400, "8 repeats the sign of a byte"
    assert computed("lop3.b32 %r10, %r2, %r3, %r2, 0xea;", a, b)[0] == (a[0] & b[0]) | a[0]
    assert computed("bfe.s32 %r10, %r3, 4, 8;", a, b).view(np.int32)[0] == 0x5C
    assert computed("bfe.s32 %r10, %r3, 4, 4;", a, b).view(np.int32)[0] == -4
    assert computed("shr.s32 %r10, %r2, 40;", np.full(1, -5, np.int32)).view(np.int32)[0] == -1
    assert computed("shl.b32 %r10, %r2, 32;", a)[0] == 0
    assert computed("mul.hi.s32 %r10, %r2, %r3;", np.full(1, -3, np.int32), a).view(np.int32)[0] == -1
    assert (
        computed("div.s32 %r10, %r2, %r3;", np.full(1, -7, np.int32), np.full(1, 2, np.int32)).view(np.int32)[0] == -3
    )
    total = computed("mad.lo.cc.u32 %r10, %r2, %r3, %r3; madc.hi.u32 %r10, %r2, %r3, 0;", a, b)[0]
    assert total == (int(a[0]) * int(b[0]) + int(b[0])) >> 32


def test_floats_round_once() -> None:
    x = np.array([1 + 2**-12], np.float32)
    c = np.array([-1 - 2**-11], np.float32)
    assert computed("fma.rn.f32 %r10, %r2, %r2, %r3;", x, c).view(np.float32)[0] == np.float32(2**-24)
    pair = computed("cvt.rn.bf16x2.f32 %r10, %r2, %r3;", np.array([1 + 2**-8], np.float32), np.array([3.0], np.float32))
    assert pair[0] == 0x3F80_4040, "the first is the upper half, ties to even"
    halves = computed("mul.bf16x2 %r10, %r2, %r3;", pair, pair)
    assert halves[0] == 0x3F80_4110
    assert computed("cvt.rzi.s32.f32 %r10, %r2;", np.array([-2.7], np.float32)).view(np.int32)[0] == -2
    assert computed("cvt.rna.tf32.f32 %r10, %r2;", np.array([1 + 2**-11], np.float32))[0] == 0x3F80_2000
    nan = np.array([np.nan], np.float32)
    assert computed("setp.ltu.f32 %p2, %r2, %r2; selp.b32 %r10, 1, 0, %p2;", nan)[0] == 1
    assert computed("setp.ge.f32 %p2, %r2, %r2; selp.b32 %r10, 1, 0, %p2;", nan)[0] == 0


def test_lanes_exchange_and_part() -> None:
    lanes = np.arange(32, dtype=np.uint32)
    assert (computed("shfl.sync.bfly.b32 %r10, %r2, 5, 31, -1;", lanes) == (lanes ^ 5)).all()
    assert (computed("shfl.sync.idx.b32 %r10, %r2, 7, 31, -1;", lanes) == 7).all()
    assert (computed("elect.sync %r11|%p2, -1; selp.b32 %r10, 1, 0, %p2;", lanes) == (lanes == 0)).all()
    loop = """
    mov.b32 %r10, 0;
    again:
    add.s32 %r10, %r10, 1;
    setp.lt.u32 %p2, %r10, %r2;
    @%p2 bra again;
    """
    assert (computed(loop, lanes) == np.maximum(lanes, 1)).all(), "each lane leaves the loop by itself"
    votes = computed("setp.gt.u32 %p2, %r2, 29; vote.sync.ballot.b32 %r10, %p2, -1;", lanes)
    assert (votes == 3 << 30).all()


def box_of(numbers: Array, swizzle: int) -> Descriptor:
    rows, columns = numbers.shape
    return Descriptor(numbers.ctypes.data, numbers.itemsize, numbers.shape, (columns, 1), (rows, columns), swizzle)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
def test_a_box_comes_in_the_order_of_its_swizzle(swizzle: int, order: str) -> None:
    width = 16 << swizzle if swizzle else 128
    numbers = np.arange(16 * width // 4, dtype=np.uint32).reshape(16, width // 4)
    result = np.zeros(numbers.size, np.uint32)
    copy = "".join(
        f"add.s32 %r23, %r20, %r23; ld.shared.b32 %r24, [%r23+{1024 + 128 * part}];"
        f"st.global.b32 [%rd5+{128 * part}], %r24;"
        "shl.b32 %r23, %r1, 2;"
        for part in range(numbers.size // 32)
    )
    body = BOX.format(bytes=numbers.nbytes) + WAIT + "shl.b32 %r23, %r1, 2;" + copy
    run(body, result, result, shared=4096, boxes=box_of(numbers, swizzle), read=numbers, order=order)
    pieces = width // 16
    lines = max(1, 128 // width)  # rows of a line of 128 bytes
    chunks = numbers.reshape(16, pieces, 4)
    for row in range(16):
        for piece in range(pieces):
            moved = piece ^ row // lines % (1 << swizzle) if swizzle else piece
            at = (row * pieces + moved) * 4
            assert (result[at : at + 4] == chunks[row, piece]).all()


def test_a_box_that_nothing_waits_for_is_not_there() -> None:
    numbers, result = np.zeros((8, 32), np.uint32), np.zeros(32, np.uint32)
    read = "ld.shared.b32 %r24, [%r20+1024]; st.global.b32 [%rd5], %r24;"
    run(BOX.format(bytes=1024) + WAIT + read, result, result, shared=4096, boxes=box_of(numbers, 3), read=numbers)
    with pytest.raises(Fault, match="nothing has written"):
        run(BOX.format(bytes=1024) + read, result, result, shared=4096, boxes=box_of(numbers, 3), read=numbers)
    with pytest.raises(Fault, match="wait forever"):
        run(BOX.format(bytes=1040) + WAIT, result, result, shared=4096, boxes=box_of(numbers, 3), read=numbers)
    with pytest.raises(Fault, match="ends while copies are under way"):
        run(BOX.format(bytes=1024), result, result, shared=4096, boxes=box_of(numbers, 3), read=numbers)


def test_what_the_copy_engine_cannot_take_is_refused() -> None:
    good: dict[str, Any] = {"base": 64, "item": 2, "shape": (9, 64), "strides": (64, 1), "box": (8, 64), "swizzle": 3}
    Descriptor(**good)
    for wrong in (
        {"base": 72},
        {"strides": (60, 1)},
        {"strides": (64, 2)},
        {"box": (8, 4)},
        {"box": (8, 128)},
        {"box": (512, 64)},
    ):
        with pytest.raises(Fault):
            Descriptor(**(good | wrong))


SUMS = ",".join(f"%r{40 + number}" for number in range(4))
# B is the box at 1024: 64 columns in a swizzle over 128 bytes, 8 rows. A: each lane's four registers.
PRODUCT = f"""
add.s32 %r25, %r20, 1024;
bfe.u32 %r25, %r25, 4, 14;
cvt.u64.u32 %rd11, %r25;
or.b64 %rd11, %rd11, {1 << 62 | 64 << 32 | 1 << 16};
ld.global.v4.b32 {{%r30, %r31, %r32, %r33}}, [%rd7];
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{{SUMS}}}, {{%r30,%r31,%r32,%r33}}, %rd11, 0, 1, 1, 0;
wgmma.commit_group.sync.aligned;
"""
FINISH = "wgmma.wait_group.sync.aligned 0;"
STORE = f"st.global.v4.b32 [%rd8], {{{SUMS}}};"
ADDRESSES = "mul.wide.u32 %rd6, %r1, 16; add.s64 %rd7, %rd1, %rd6; add.s64 %rd8, %rd2, %rd6;"


def test_a_product_of_a_group_of_warps() -> None:
    random = np.random.default_rng(0)
    left, right = random.integers(-8, 8, (64, 16)), random.integers(-8, 8, (8, 64))
    # Registers of A as the ISA orders them: rows g and g + 8, columns 2t and 2t + 8, of each warp's sixteen rows.
    fragments = np.zeros((4, 32, 4, 2), np.float16)
    for lane in range(32):
        for number in range(4):
            row, column = lane // 4 + number % 2 * 8, lane % 4 * 2 + number // 2 * 8
            fragments[:, lane, number] = left.reshape(4, 16, 16)[:, row, column : column + 2]
    columns = np.ascontiguousarray(right.astype(np.float16))
    sums = np.zeros((4, 32, 4), np.float32)
    body = ADDRESSES + BOX.format(bytes=1024) + WAIT + PRODUCT
    given = {"threads": 128, "shared": 4096, "boxes": box_of(columns, 3), "read": columns}
    run(body + FINISH + STORE, fragments.view(np.uint32), sums.view(np.uint32), **given)
    wanted = (left @ right[:, :16].T).reshape(4, 16, 8)
    for lane in range(32):
        for number in range(4):
            row, column = lane // 4 + number // 2 * 8, lane % 4 * 2 + number % 2
            assert (sums[:, lane, number] == wanted[:, row, column]).all()
    with pytest.raises(Fault, match="sums of a product under way"):
        run(body + STORE, fragments.view(np.uint32), sums.view(np.uint32), **given)
    with pytest.raises(Fault, match="an input of a product under way is written"):
        written = body + "mov.b32 %r31, 0;" + FINISH + STORE
        run(written, fragments.view(np.uint32), sums.view(np.uint32), **given)
    over = BOX.split("@%p1 mbarrier.arrive")[1].format(bytes=1024)
    with pytest.raises(Fault, match="overwrites what a product under way reads"):
        run(
            body + "@%p1 mbarrier.arrive" + over + FINISH,
            fragments.view(np.uint32),
            sums.view(np.uint32),
            **given,
            order="early",
        )


def test_tiles_go_to_shared_memory_and_back() -> None:
    numbers, result = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    there = "shl.b32 %r23, %r1, 4; and.b32 %r23, %r23, 112; mov.b32 %r20, global_smem; add.s32 %r23, %r23, %r20;"
    body = f"{there} ld.global.b32 %r2, [%rd4]; stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r23], {{%r2}};"
    load = "ldmatrix.sync.aligned.m8n8.x1{trans}.shared.b16 {{%r3}}, [%r23]; st.global.b32 [%rd5], %r3;"
    run(body + load.format(trans=""), numbers, result, shared=128)
    assert (result == numbers).all()
    run(body + load.format(trans=".trans"), numbers, result, shared=128)
    whole = numbers.view(np.uint16).reshape(8, 8)
    assert (result.view(np.uint16).reshape(8, 8) == whole.T).all()


ALLOCATED = """
mov.b32 %r20, global_smem;
setp.lt.u32 %p1, %r1, 32;
@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r20], 32;
bar.sync 0;
ld.shared.b32 %r21, [%r20];
and.b32 %r22, %r1, 96;
shl.b32 %r22, %r22, 16;
add.s32 %r22, %r22, %r21;
"""


def test_warps_reach_their_lanes_of_tensor_memory() -> None:
    """Two columns of a lane, written as such, are read as one column each by the two halves of a warp."""
    numbers, result = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    write = "add.s32 %r3, %r1, 1000; tcgen05.st.sync.aligned.32x32b.x2.b32 [%r22 + 0], {%r1, %r3};"
    read = "tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r4}, [%r22 + 0], 1; st.global.b32 [%rd5], %r4;"
    free = "bar.sync 0; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r21, 32;"
    run(ALLOCATED + write + read + free, numbers, result, threads=128, shared=16)
    lane = numbers % 32
    assert (result == np.where(lane < 16, numbers, numbers - 16 + 1000)).all()
    with pytest.raises(Fault, match="outside the allocated"):
        run(ALLOCATED + write.replace("+ 0", "+ 31"), numbers, result, threads=128, shared=16)
    with pytest.raises(Fault, match="tensor memory of another warp"):
        run(ALLOCATED + write.replace("%r22", "%r21"), numbers, result, threads=128, shared=16)
    with pytest.raises(Fault, match="not allocated"):
        run(ALLOCATED + free.replace("%r21", "64"), numbers, result, threads=128, shared=16)
    with pytest.raises(Fault, match="columns of tensor memory"):
        run(ALLOCATED.replace("[%r20], 32", "[%r20], 48"), numbers, result, threads=128, shared=16)


def test_more_arrivals_than_a_barrier_counts_are_refused() -> None:
    numbers = np.zeros(32, np.uint32)
    body = "mov.b32 %r20, global_smem; setp.eq.b32 %p1, %r1, 0; @%p1 mbarrier.init.shared::cta.b64 [%r20], 2;"
    arrive = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r20];"
    run(body + 2 * arrive + WAIT, numbers, numbers, shared=64)
    with pytest.raises(Fault, match="wait forever"):
        run(body + arrive + WAIT, numbers, numbers, shared=64)
    with pytest.raises(Fault, match="no barrier at"):
        run(arrive.replace("@%p1 ", "").replace("%r20", "%r1"), numbers, numbers, shared=64)
    with pytest.raises(Fault, match="more arrivals"):
        run(body + "mov.b32 %r5, 3;" + arrive.replace("[%r20]", "[%r20], %r5"), numbers, numbers, shared=64)
