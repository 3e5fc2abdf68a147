"""Device buffers of a static batch: each step refills them in one copy, at constant addresses."""

from __future__ import annotations

import numpy as np
import pytest

from kvforge.worker.attention import PagedBatch
from kvforge.worker.attention.batch import PLANS_MAX
from kvforge.worker.device.device import Device
from kvforge.worker.device.queue import Staging

BLOCK_SIZE, WIDTH, EXTRA = 8, 5, 2


def tables_of(rows: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    return np.arange(100, 100 + rows * WIDTH, dtype=np.int32).reshape(rows, WIDTH)


def lengths_of(batch: PagedBatch) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return batch.lengths.astype(np.int32)


def check(batch: PagedBatch, lengths: list[int], extra: list[int]) -> None:
    rows, count = len(batch.counts), len(lengths)
    tables = tables_of(count)
    last = np.array(lengths) - 1
    slots = tables[np.arange(count), last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE
    assert batch.kv_slots_on_device.tolist() == [*slots.tolist(), *[-1] * (rows - count)]
    assert batch.extra_on_device.tolist() == extra
    assert batch.device_array("lengths", lengths_of).tolist() == [*lengths, *[0] * (rows - count)]
    for row, length in enumerate(lengths):
        used = -(-length // BLOCK_SIZE)
        assert batch.tables_on_device[row, :used].tolist() == tables[row, :used].tolist()


def test_a_step_goes_to_the_device_in_one_copy(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = Staging.send
    monkeypatch.setattr(Staging, "send", lambda self, count: (sent.append(count), send(self, count)))
    batch = PagedBatch.static(4, WIDTH, BLOCK_SIZE, cpu, extra=EXTRA)
    batch.fill(tables_of(3), np.array([1, 20, 40]), np.arange(8, dtype=np.int32))
    batch.device_array("lengths", lengths_of)
    places = [tensor.data_ptr() for tensor in (batch.kv_slots_on_device, batch.extra_on_device, batch.tables_on_device)]
    places.append(batch.device_array("lengths", lengths_of).data_ptr())
    check(batch, [1, 20, 40], list(range(8)))
    assert all(place % 16 == 0 for place in places), "kernels are compiled for that"
    for lengths, first in (([9], 50), ([40, 40, 40, 40], 60), ([2, 17], 70)):
        sent.clear()
        extra = np.arange(first, first + 8, dtype=np.int32)
        batch.fill(tables_of(len(lengths)), np.array(lengths), extra)
        assert len(sent) == 1
        check(batch, lengths, extra.tolist())
    assert places == [
        batch.kv_slots_on_device.data_ptr(),
        batch.extra_on_device.data_ptr(),
        batch.tables_on_device.data_ptr(),
        batch.device_array("lengths", lengths_of).data_ptr(),
    ]


def test_batches_that_share_memory_lay_it_out_each_for_itself(cpu: Device) -> None:
    """As for captured graphs, which run one at a time: the batch that was filled last is complete."""
    large = PagedBatch.static(4, WIDTH, BLOCK_SIZE, cpu, extra=EXTRA)
    small = PagedBatch.static(1, WIDTH, BLOCK_SIZE, cpu, large, EXTRA)
    for _ in range(2):
        large.fill(tables_of(4), np.array([8, 9, 10, 33]), np.arange(8, dtype=np.int32))
        check(large, [8, 9, 10, 33], list(range(8)))
        small.fill(tables_of(1), np.array([40]), np.array([-1, -2], np.int32))
        check(small, [40], [-1, -2])


def test_plans_beyond_their_room_are_refused(cpu: Device) -> None:
    batch = PagedBatch.static(1, WIDTH, BLOCK_SIZE, cpu)
    batch.fill(tables_of(1), np.array([3]))
    batch.device_array("large", lambda _: np.zeros(PLANS_MAX - 4, np.int32))
    with pytest.raises(RuntimeError, match="plans of a static batch"):
        batch.device_array("one more", lambda _: np.zeros(16, np.int32))


def test_longer_rows_are_packed_as_a_refill_would_send_them(cpu: Device) -> None:
    """Rows grow into blocks that the first refill has sent already."""
    batch = PagedBatch.static(4, WIDTH, BLOCK_SIZE, cpu, extra=EXTRA)
    other = PagedBatch.static(4, WIDTH, BLOCK_SIZE, cpu, extra=EXTRA)
    first = np.array([1, 20, 6])
    batch.fill(tables_of(3), first, np.arange(8, dtype=np.int32), length_max=26)
    other.fill(tables_of(3), first + 6, np.arange(8, dtype=np.int32))
    for each in (batch, other):
        each.device_array("lengths", lengths_of)
    sent = batch.tables_on_device.clone()
    for number in range(1, 7):
        extra = np.arange(10 * number, 10 * number + 8, dtype=np.int32)
        batch.lengthen(first + number)
        packed = np.full(batch.packed_on_device.numel(), -7, np.int32)
        batch.pack(packed, extra)
        batch.packed_on_device.copy_(batch.device.upload(packed))
        check(batch, [1 + number, 20 + number, 6 + number], extra.tolist())
    assert batch.tables_on_device.tolist() == sent.tolist()
    other.fill(tables_of(3), first + 6, extra)
    assert other.kv_slots.tolist() == batch.kv_slots.tolist()
    with pytest.raises(AssertionError, match="narrower"):
        batch.fill(tables_of(3), first, extra, length_max=WIDTH * BLOCK_SIZE + 1)
