"""Rows of numbers in any dtype, for CPU kernels: conversion to float32 and back.

A row may have any length. Its last numbers are handled by a vector that overlaps the one before; a row shorter than a
vector is handled number by number.
"""

from __future__ import annotations

from .kernel import part
from .vector import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FP8,
    INT8,
    LANES,
    first_lane,
    loading,
    multiply,
    read_float,
    spreading,
    storing,
    write_float,
)

load, store, spread = loading(LANES, FLOAT32), storing(LANES, FLOAT32), spreading(LANES)
_load_float16, _load_bfloat16 = loading(LANES, FLOAT16), loading(LANES, BFLOAT16)
_load_int8, _load_fp8 = loading(LANES, INT8), loading(LANES, FP8)
_store_float16, _store_bfloat16 = storing(LANES, FLOAT16), storing(LANES, BFLOAT16)
_one_float32, _one_float16, _one_bfloat16 = loading(1, FLOAT32), loading(1, FLOAT16), loading(1, BFLOAT16)
_one_int8, _one_fp8 = loading(1, INT8), loading(1, FP8)
_put_float32, _put_float16, _put_bfloat16 = storing(1, FLOAT32), storing(1, FLOAT16), storing(1, BFLOAT16)
spread_one = spreading(1)


@part
def item_bytes(code):
    """Return the bytes of a number of this dtype."""
    if code == FLOAT32:
        return 4
    return 2 if code in (FLOAT16, BFLOAT16) else 1


def memory_of(lanes):
    """Make load(address, code) and store(address, vector, code) for vectors of this many lanes."""
    load_32, load_16, load_brain = (loading(lanes, code) for code in (FLOAT32, FLOAT16, BFLOAT16))
    store_32, store_16, store_brain = (storing(lanes, code) for code in (FLOAT32, FLOAT16, BFLOAT16))

    @part
    def load(address, code):
        if code == FLOAT32:
            return load_32(address)
        return load_brain(address) if code == BFLOAT16 else load_16(address)

    @part
    def store(address, vector, code):
        if code == FLOAT32:
            store_32(address, vector)
        elif code == BFLOAT16:
            store_brain(address, vector)
        else:
            store_16(address, vector)

    return load, store


@part
def load_any(address, code):
    """16 numbers."""
    if code == FLOAT32:
        return load(address)
    if code == BFLOAT16:
        return _load_bfloat16(address)
    if code == FLOAT16:
        return _load_float16(address)
    return _load_int8(address) if code == INT8 else _load_fp8(address)


@part
def read_any(address, code):
    """Load one number."""
    if code == FLOAT32:
        return first_lane(_one_float32(address))
    if code == BFLOAT16:
        return first_lane(_one_bfloat16(address))
    if code == FLOAT16:
        return first_lane(_one_float16(address))
    return first_lane(_one_int8(address)) if code == INT8 else first_lane(_one_fp8(address))


@part
def store_any(address, vector, code):
    """Store 16 numbers, rounded to a float dtype."""
    if code == FLOAT32:
        store(address, vector)
    elif code == BFLOAT16:
        _store_bfloat16(address, vector)
    else:
        _store_float16(address, vector)


@part
def write_any(address, number, code):
    """Store one number, rounded to a float dtype."""
    one = spread_one(number)
    if code == FLOAT32:
        _put_float32(address, one)
    elif code == BFLOAT16:
        _put_bfloat16(address, one)
    else:
        _put_float16(address, one)


@part
def widen(source, code, target, count, factor):
    """Write target [count] float32 = source [count] x factor. They must not overlap."""
    size = item_bytes(code)
    if count < LANES:
        for index in range(count):
            write_float(target + 4 * index, read_any(source + size * index, code) * factor)
        return
    factors = spread(factor)
    for index in range(0, count, LANES):
        first = min(index, count - LANES)
        store(target + 4 * first, multiply(load_any(source + size * first, code), factors))


@part
def narrow(source, target, code, count, factor):
    """Write target [count] = source [count] float32 x factor. They must not overlap."""
    size = item_bytes(code)
    if count < LANES:
        for index in range(count):
            write_any(target + size * index, read_float(source + 4 * index) * factor, code)
        return
    factors = spread(factor)
    for index in range(0, count, LANES):
        first = min(index, count - LANES)
        store_any(target + size * first, multiply(load(source + 4 * first), factors), code)


@part
def copy(source, code, target, target_code, count):
    """Write target [count] = source [count], in another dtype, a float. They must not overlap."""
    size, target_size = item_bytes(code), item_bytes(target_code)
    if count < LANES:
        for index in range(count):
            write_any(target + target_size * index, read_any(source + size * index, code), target_code)
        return
    for index in range(0, count, LANES):
        first = min(index, count - LANES)
        store_any(target + target_size * first, load_any(source + size * first, code), target_code)
