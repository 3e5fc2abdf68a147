"""Self-test of the kernels that sample, feed tokens back and copy numbers, against plain torch, at a worker's start.

It takes milliseconds, like that of the layers (see `kernels.selftest`), so no result is cached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from kvforge.protocol.messages import RowStart, SamplingParams
from kvforge.worker.device.check import require_all_right, require_right
from kvforge.worker.device.device import WAY_OUT, Device
from kvforge.worker.device.queue import DeviceEvent, HostBuffer, Staging

from .sampler import NO_TOKEN, WORD_BITS, HostRows, SamplingState

TEMPERATURES = (0.0, 1.0, 0.7, 0.0, 1.0)  # one per row; the last two rows are not finite
COPIED = (1, 1025, 20_000)  # numbers: less than one program handles, more, and many
LOGPROB_TOLERANCE = 1e-5


@torch.inference_mode()
def sampling_test(device: Device, vocab_size: int) -> None:
    """Test greedy rows, rows that draw, and rows of NaN.

    Raises:
        KernelError: Names the failing kernel and the vocabulary.
        GpuError: The device failed.
    """
    where = f"a vocabulary of {vocab_size}"
    checks = [
        ("sampling", where, lambda: _choosing(device, vocab_size)),
        ("sampling", f"{where}, by masks", lambda: _choosing(device, vocab_size, masked=True)),
    ]
    if device.runs_kernels:
        checks.append(("token feeding", where, lambda: _feeding(device, vocab_size)))
    require_all_right(device, [partial(require_right, device, *check, WAY_OUT) for check in checks])


def copies_test(device: Device) -> None:
    """Copy numbers to the device and back.

    Raises:
        KernelError: Names the failing kernel and the number of numbers.
        GpuError: The device failed.
    """
    for count in COPIED:
        require_right(device, "copy", f"{count} numbers", _copying(device, count), WAY_OUT)


def _choosing(device: Device, vocab_size: int, masked: bool = False) -> str:
    rows = len(TEMPERATURES)
    slots = np.arange(rows)[::-1].copy()
    on_device = device.upload(slots)
    numbers = np.random.default_rng(0).normal(0, 3, (rows, vocab_size)).astype(np.float32)
    numbers[:2, vocab_size // 2] = np.nan  # slots 4 and 3
    logits = device.upload(numbers)
    ours, beside, plain = (_state(each, vocab_size) for each in (device, device, replace(device, kernels=False)))
    masks = device.upload(_masks(rows, vocab_size)) if masked else None
    packed = torch.full((3 * rows,), -1, dtype=torch.int32, device=device.torch_device)
    ours.sample_simple(logits, on_device, torch.ones_like(on_device), packed, masks)
    got = HostRows.unpacked(packed.cpu().numpy(), np.zeros(rows, np.int32))
    want = plain.sample(logits, slots, masks).to_host()
    good = want.finite
    if got.finite.tolist() != good.tolist():
        return f"rows {got.finite.tolist()} are finite, not {good.tolist()}"
    if got.tokens[good].tolist() != want.tokens[good].tolist():
        return f"it chooses the tokens {got.tokens[good].tolist()}, not {want.tokens[good].tolist()}"
    drawn = beside.sample(logits, slots, masks).to_host().tokens[good].tolist()
    if drawn != want.tokens[good].tolist():
        return f"it draws the tokens {drawn}, not {want.tokens[good].tolist()}"
    difference = float(np.abs(got.logprobs[good] - want.logprobs[good]).max())
    if not difference <= LOGPROB_TOLERANCE:
        return f"log-probabilities differ by {difference:.1e}"
    for name in ("generated", "last_token"):
        if not torch.equal(getattr(ours, name), getattr(plain, name)):
            return f"{name} becomes {getattr(ours, name).tolist()}, not {getattr(plain, name).tolist()}"
    return ""


def _masks(rows: int, vocab_size: int) -> npt.NDArray[np.int32]:
    """Return masks [rows, words] int32 that allow every third token and a few more."""
    bits = np.zeros((rows, -(-vocab_size // WORD_BITS) * WORD_BITS), np.bool_)
    bits[:, ::3] = bits[:, 1:vocab_size:101] = True
    packed: npt.NDArray[np.int32] = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return packed


def _feeding(device: Device, vocab_size: int) -> str:
    from .kernels import feed_tokens

    last = np.array([NO_TOKEN, 0, vocab_size - 1], np.int64)
    packed = np.array([[-1, -1, -1, 5, 0], [0, 1, 2, 0, 2], [7, 8, 9, 10, 11], [1, 0, 1, 0, 1]], np.int32)
    fed = feed_tokens(device.upload(packed), device.upload(last)).cpu().numpy()
    want = packed.astype(np.int64)
    want[0] = np.where(packed[0] < 0, np.maximum(last[packed[1]], 0), packed[0])
    return "" if np.array_equal(fed, want) else f"it feeds {fed.tolist()}, not {want.tolist()}"


def _copying(device: Device, count: int) -> Callable[[], str]:
    def run() -> str:
        sent: npt.NDArray[np.int32] = np.arange(-3, count - 3, dtype=np.int32) * 7919
        staging, landing = Staging(device, count + 1), HostBuffer(device, count + 1)
        staging.host()[:count] = sent
        staging.send(count)
        fetched = landing.fetch(staging.on_device)
        DeviceEvent(device).wait()
        wrong = np.flatnonzero(fetched.array() != np.append(sent, 0))
        return f"{len(wrong)} of {count} numbers arrive wrongly, the first at {wrong[0]}" if len(wrong) else ""

    return run


def _state(device: Device, vocab_size: int) -> SamplingState:
    state = SamplingState(len(TEMPERATURES), vocab_size, device)
    for slot, temperature in enumerate(TEMPERATURES):
        sampling = SamplingParams(temperature=temperature)
        state.begin(RowStart(slot=slot, request_id=1, sampling=sampling, seed=(slot + 1) * 0x9E3779B97F4A7C15 % 2**64))
    state.upload_starts()
    return state
