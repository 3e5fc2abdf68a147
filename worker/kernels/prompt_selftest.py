"""Self-test of the kernels of prompt chunks against plain torch, on the serving device and weights.

See `recurrent_selftest`, whose comparison it shares: a row's result is here that of all its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from kvforge.worker.attention.states import StateRows, StateTensor
from kvforge.worker.device.check import require_all_right, require_right
from kvforge.worker.device.device import WAY_OUT, Device

from .decoder import FusedDecoder
from .interface import LayerOperations
from .plain import PlainOperations
from .prompt_reference import PlainPrompts
from .prompt_rows import PromptRows, prompt_rows
from .recurrent import (
    CONVOLUTION,
    RECURRENT,
    Convolution,
    DeltaInputs,
    GatedDelta,
    MixerStep,
    StateOperations,
    form_of_prompts,
)
from .recurrent_selftest import compare_steps, forms_of, scattered, steps_of
from .selective import SelectiveInputs, SelectiveSpace
from .selftest import TOLERANCE
from .state_space import StateSpace, StateSpaceInputs

# Start and tokens of each row: from the begin, with a whole chunk and some; from a border; from within a chunk.
STARTS, COUNTS = np.array([0, 64, 205]), np.array([70, 1, 58])
TOKENS = int(COUNTS.sum())


def prompt_test(fused: FusedDecoder, device: Device) -> None:
    """Test the prompt kernels of the decoder's recurrent layers, each form once.

    Raises:
        KernelError: Names the kernel and the shape.
        GpuError: The device failed.
    """
    prompts_test(fused.operations, fused.table.dtype, steps_of(fused), device)


def prompts_test(operations: LayerOperations, dtype: torch.dtype, steps: Sequence[MixerStep], device: Device) -> None:
    """Test the prompt kernels of recurrent layers, each form once.

    Raises:
        KernelError: Names the kernel and the shape.
        GpuError: The device failed.
    """
    in_chunks = operations.for_prompts(dtype) is not None
    steps = [each for each in steps if form_of_prompts(each, operations, dtype) is not None]
    name = str(dtype).removeprefix("torch.")
    forms = forms_of(steps)
    checks: list[Callable[[], None]] = []
    for convolution in forms.convolutions if in_chunks else ():
        shape = f"prompts of {'x'.join(map(str, convolution.weight.shape))}, {name}"
        compare = partial(compare_prompt_convolution, operations, convolution, dtype)
        checks.append(partial(require_right, device, "short convolution", shape, compare, WAY_OUT))
    for delta in forms.deltas:
        shape = f"prompts of {'x'.join(map(str, delta.state[1:]))}, {name}"
        compare_rule = partial(compare_prompt_delta, operations, delta, dtype)
        checks.append(partial(require_right, device, "gated delta", shape, compare_rule, WAY_OUT))
    for space in forms.spaces:
        shape = f"prompts of {'x'.join(map(str, space.state[1:]))}, {name}"
        compare_space = partial(compare_prompt_space, operations, space, dtype)
        checks.append(partial(require_right, device, "state space", shape, compare_space, WAY_OUT))
    for selective in forms.selectives:
        shape = f"prompts of {'x'.join(map(str, selective.state[1:]))}, {name}"
        compare_selective = partial(compare_prompt_selective, operations, selective, dtype)
        checks.append(partial(require_right, device, "selective state space", shape, compare_selective, WAY_OUT))
    require_all_right(device, checks)


@torch.inference_mode()
def compare_prompt_convolution(
    operations: LayerOperations, convolution: Convolution, dtype: torch.dtype, kept: torch.dtype | None = None
) -> str:
    """Return how a convolution differs from plain torch, or a row's bits from those alone; "" if they do not."""
    weight = convolution.weight
    generator = torch.Generator(weight.device).manual_seed(1)
    x = torch.randn((TOKENS, convolution.inputs), generator=generator, device=weight.device).to(dtype)
    tensor = StateTensor(0, CONVOLUTION, (1, *weight.shape), dtype, kept)

    def advance(operations: LayerOperations, chosen: slice, states: StateRows) -> torch.Tensor:
        over, rows = _prompts(operations, chosen, x)
        return _by_row(over.convolve(x, states, convolution), rows)

    tolerance = TOLERANCE[dtype if kept is None else kept]
    return compare_steps(operations, advance, scattered(tensor, len(COUNTS), generator), tolerance)


@torch.inference_mode()
def compare_prompt_delta(
    operations: LayerOperations, delta: GatedDelta, dtype: torch.dtype, kept: torch.dtype | None = None
) -> str:
    """Return how a gated delta rule differs from plain torch, or a row's bits from those alone; "" if they do not."""
    device = delta.weight.device
    generator = torch.Generator(device).manual_seed(1)
    inputs = DeltaInputs(
        *(torch.randn((TOKENS, width), generator=generator, device=device).to(dtype) for width in delta.widths)
    )

    def advance(operations: LayerOperations, chosen: slice, states: StateRows) -> torch.Tensor:
        over, rows = _prompts(operations, chosen, inputs.mixed)
        return _by_row(over.advance_delta(inputs, states, delta), rows)

    tensor = StateTensor(0, RECURRENT, delta.state, torch.float32, kept)
    tolerance = max(TOLERANCE[dtype], 0 if kept is None else TOLERANCE[kept])
    return compare_steps(operations, advance, scattered(tensor, len(COUNTS), generator), tolerance)


@torch.inference_mode()
def compare_prompt_space(
    operations: LayerOperations, space: StateSpace, dtype: torch.dtype, kept: torch.dtype | None = None
) -> str:
    """Return how state spaces differ from plain torch, or a row's bits from those alone; "" if they do not."""
    device = space.weight.device
    generator = torch.Generator(device).manual_seed(1)
    widths = (sum(space.parts), len(space.weight), space.heads)
    inputs = StateSpaceInputs(
        *(torch.randn((TOKENS, width), generator=generator, device=device).to(dtype) for width in widths)
    )

    def advance(operations: LayerOperations, chosen: slice, states: StateRows) -> torch.Tensor:
        over, rows = _prompts(operations, chosen, inputs.mixed)
        return _by_row(over.advance_state_space(inputs, states, space), rows)

    tensor = StateTensor(0, RECURRENT, space.state, torch.float32, kept)
    tolerance = max(TOLERANCE[dtype], 0 if kept is None else TOLERANCE[kept])
    return compare_steps(operations, advance, scattered(tensor, len(COUNTS), generator), tolerance)


@torch.inference_mode()
def compare_prompt_selective(
    operations: LayerOperations, space: SelectiveSpace, dtype: torch.dtype, kept: torch.dtype | None = None
) -> str:
    """Return how state spaces differ from plain torch, or a row's bits from those alone; "" if they do not."""
    device = space.rates.device
    generator = torch.Generator(device).manual_seed(1)
    like = torch.empty(0, dtype=dtype, device=device)
    dtype = torch.float32 if space.is_wide else dtype
    inputs = SelectiveInputs(
        *(torch.randn((TOKENS, width), generator=generator, device=device).to(dtype) for width in space.widths)
    )

    def advance(operations: LayerOperations, chosen: slice, states: StateRows) -> torch.Tensor:
        over, rows = _prompts(operations, chosen, like)
        return _by_row(over.advance_selective(inputs, states, space), rows)

    tensor = StateTensor(0, RECURRENT, space.state, torch.float32, kept)
    tolerance = max(TOLERANCE[dtype], 0 if kept is None else TOLERANCE[kept])
    return compare_steps(operations, advance, scattered(tensor, len(COUNTS), generator), tolerance)


def _prompts(operations: LayerOperations, chosen: slice, like: torch.Tensor) -> tuple[StateOperations, PromptRows]:
    """Return the operations over the chosen rows, and these."""
    firsts = np.cumsum(COUNTS) - COUNTS
    rows = prompt_rows(
        STARTS[chosen],
        firsts[chosen],
        COUNTS[chosen],
        lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(like.device),
    )
    form = None if type(operations) is PlainOperations else operations.for_prompts(like.dtype)
    if form is None:
        form = operations.for_token_prompts(like.dtype) or PlainPrompts
    return form(rows), rows


def _by_row(found: torch.Tensor, rows: PromptRows) -> torch.Tensor:
    """Return the results of each row's tokens, with zeros behind: [rows, tokens, n]."""
    places = [slice(first, first + count) for first, count in zip(rows.firsts, rows.counts, strict=True)]
    made = torch.zeros((len(places), int(COUNTS.max()), found.shape[1]), dtype=found.dtype, device=found.device)
    for row, place in enumerate(places):
        made[row, : place.stop - place.start] = found[place]
    return made
