"""Rotary embedding and KV write on the CPU in one kernel, with the bits of `reference.rotate` and `write_kv`."""

from __future__ import annotations

from kvforge.worker.cpu.kernel import cpu_kernel, part
from kvforge.worker.cpu.rows import copy, item_bytes, load_any, read_any, store_any, write_any
from kvforge.worker.cpu.vector import LANES, add, multiply, next_ticket, read_integer, reading_integers, subtract

TOKENS = 4  # per ticket
read_sizes = reading_integers(26)


@part
def rotate_head(source, code, cos, sin, angle_code, half, target):
    """Rotate source into target [2 x half], possibly source itself. cos, sin: [2 x half]."""
    size, angle_size = item_bytes(code), item_bytes(angle_code)
    second, angle_second, at = size * half, angle_size * half, 0
    while at < half:
        here, there = source + size * at, target + size * at
        c, s = cos + angle_size * at, sin + angle_size * at
        if at + LANES <= half:
            a, b = load_any(here, code), load_any(here + second, code)
            turned = subtract(multiply(a, load_any(c, angle_code)), multiply(b, load_any(s, angle_code)))
            far_cos, far_sin = load_any(c + angle_second, angle_code), load_any(s + angle_second, angle_code)
            store_any(there, turned, code)
            store_any(there + second, add(multiply(b, far_cos), multiply(a, far_sin)), code)
            at += LANES
        else:
            x, y = read_any(here, code), read_any(here + second, code)
            near = x * read_any(c, angle_code) - y * read_any(s, angle_code)
            far = y * read_any(c + angle_second, angle_code) + x * read_any(s + angle_second, angle_code)
            write_any(there, near, code)
            write_any(there + second, far, code)
            at += 1


ARGUMENTS = """
    tokens size code rotated cos sin angle_code query query_token_stride query_head_stride heads
    key key_token_stride key_head_stride value value_token_stride value_head_stride kv_heads
    slots keys values kept_code scratch scratch_stride
"""


@cpu_kernel(ARGUMENTS)
def write_rotated(arguments):
    """Rotate and store; see `CpuAttention.write_rotated`, which lays out the arguments. A ticket is a few tokens."""
    sizes = read_sizes(arguments)
    tokens, size, code, rotated, cos, sin, angle_code = sizes[2:9]
    query, query_token_stride, query_head_stride, heads = sizes[9:13]
    key, key_token_stride, key_head_stride, value, value_token_stride, value_head_stride, kv_heads = sizes[13:20]
    slots, keys, values, kept_code, scratch, scratch_stride = sizes[20:26]
    half, item, kept, angle_size = rotated // 2, item_bytes(code), item_bytes(kept_code), item_bytes(angle_code)
    turned = scratch + scratch_stride * next_ticket(arguments + 8)
    while True:
        first = TOKENS * next_ticket(arguments)
        if first >= tokens:
            return
        for token in range(first, min(first + TOKENS, tokens)):
            c, s = cos + angle_size * rotated * token, sin + angle_size * rotated * token
            for head in range(heads):
                place = query + query_token_stride * token + query_head_stride * head
                rotate_head(place, code, c, s, angle_code, half, place)
            slot = read_integer(slots + 8 * token)
            if slot < 0:
                continue
            for head in range(kv_heads):
                to = (slot * kv_heads + head) * size * kept
                place = key + key_token_stride * token + key_head_stride * head
                rotate_head(place, code, c, s, angle_code, half, turned)  # rounded to the model's dtype first
                copy(turned, code, keys + to, kept_code, rotated)
                copy(place + item * rotated, code, keys + to + kept * rotated, kept_code, size - rotated)
                place = value + value_token_stride * token + value_head_stride * head
                copy(place, code, values + to, kept_code, size)
