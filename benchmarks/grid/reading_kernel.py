"""A Triton kernel that reads and does nothing else."""

# basedpyright: basic
import triton
import triton.language as tl


@triton.jit
def read_kernel(data, sums, elements, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """Each program reads UNROLL blocks of data [elements] and writes their sum: one number."""
    program = tl.program_id(0)
    first = program.to(tl.int64) * (BLOCK * UNROLL)
    total = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(UNROLL):
        at = first + step * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(data + at, mask=at < elements, other=0).to(tl.float32)
    tl.store(sums + program, tl.sum(total, 0))
