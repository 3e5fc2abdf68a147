"""Self-test of the kernels of steps with recurrent states against plain torch, on the serving device and weights.

States lie in pages that cut them and are scattered among bytes that are NaN in every dtype. See `kernels.selftest`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvforge.worker.attention.states import ALIGNMENT, StateLayout, StatePages, StateRows, StateTensor
from kvforge.worker.device.check import require_all_right, require_right
from kvforge.worker.device.device import WAY_OUT, Device

from .decoder import FusedDecoder
from .interface import LayerOperations
from .plain import PlainOperations
from .recurrent import CONVOLUTION, RECURRENT, Convolution, DeltaInputs, GatedDelta, MixerStep
from .selective import SelectiveInputs, SelectiveSpace
from .selftest import TOLERANCE
from .state_space import StateSpace, StateSpaceInputs

ROWS = (1, 5)
Advance = Callable[[LayerOperations, slice, StateRows], torch.Tensor]


def recurrent_test(fused: FusedDecoder, device: Device) -> None:
    """Test the steps of the decoder's recurrent layers, each form once.

    Raises:
        KernelError: Names the kernel and the shape.
        GpuError: The device failed.
    """
    steps_test(fused.operations, fused.table.dtype, steps_of(fused), device)


def steps_test(operations: LayerOperations, dtype: torch.dtype, steps: Sequence[MixerStep], device: Device) -> None:
    """Test the steps of recurrent layers, each form once.

    Raises:
        KernelError: Names the kernel and the shape.
        GpuError: The device failed.
    """
    name = str(dtype).removeprefix("torch.")
    if isinstance(operations, PlainOperations) and not operations.kernels:
        return
    forms = forms_of(steps)
    checks: list[Callable[[], None]] = []
    for convolution in forms.convolutions:
        for rows in ROWS:
            shape = f"{rows} rows of {'x'.join(map(str, convolution.weight.shape))}, {name}"
            compare = partial(compare_convolution, operations, convolution, dtype, rows)
            checks.append(partial(require_right, device, "short convolution", shape, compare, WAY_OUT))
    for delta in forms.deltas:
        for rows in ROWS:
            shape = f"{rows} rows of {'x'.join(map(str, delta.state[1:]))}, {name}"
            compare = partial(compare_delta, operations, delta, dtype, rows)
            checks.append(partial(require_right, device, "gated delta", shape, compare, WAY_OUT))
    for space in forms.spaces:
        for rows in ROWS:
            shape = f"{rows} rows of {'x'.join(map(str, space.state[1:]))}, {name}"
            compare = partial(compare_state_space, operations, space, dtype, rows)
            checks.append(partial(require_right, device, "state space", shape, compare, WAY_OUT))
    for selective in forms.selectives:
        for rows in ROWS:
            shape = f"{rows} rows of {'x'.join(map(str, selective.state[1:]))}, {name}"
            compare = partial(compare_selective, operations, selective, dtype, rows)
            checks.append(partial(require_right, device, "selective state space", shape, compare, WAY_OUT))
    require_all_right(device, checks)


def steps_of(fused: FusedDecoder) -> list[MixerStep]:
    """Return the steps of a decoder's layers."""
    return [layer.mixer.step for layer in fused.layers if layer.mixer is not None and layer.mixer.step is not None]


@dataclass(frozen=True)
class Forms:
    """The parts of steps, one of each form."""

    convolutions: list[Convolution]
    deltas: list[GatedDelta]
    spaces: list[StateSpace]
    selectives: list[SelectiveSpace]


def forms_of(steps: Sequence[MixerStep]) -> Forms:
    """Return the parts of steps, one of each form."""
    convolutions = {_form(each.convolution): each.convolution for each in steps if each.convolution is not None}
    deltas = {_form_of_delta(each.delta): each.delta for each in steps if each.delta is not None}
    spaces = {_form_of_space(each.space): each.space for each in steps if each.space is not None}
    selectives = {_form_of_selective(each.selective): each.selective for each in steps if each.selective is not None}
    return Forms(list(convolutions.values()), list(deltas.values()), list(spaces.values()), list(selectives.values()))


def _form_of_delta(delta: GatedDelta) -> tuple[object, ...]:
    return delta.state, delta.key_heads, delta.is_by_channel, delta.has_sigmoid


def _form_of_space(space: StateSpace) -> tuple[object, ...]:
    return space.state, space.groups, space.normalises


def _form_of_selective(space: SelectiveSpace) -> tuple[object, ...]:
    return space.state, space.is_wide


def _form(convolution: Convolution) -> tuple[object, ...]:
    return convolution.weight.shape, convolution.bias is None, convolution.is_gated, convolution.has_silu


@torch.inference_mode()
def compare_convolution(operations: LayerOperations, convolution: Convolution, dtype: torch.dtype, rows: int) -> str:
    """Return how a convolution differs from plain torch, or a row's bits from those alone; "" if they do not."""
    weight = convolution.weight
    generator = torch.Generator(weight.device).manual_seed(rows)
    x = torch.full((rows + 1, convolution.inputs), float("nan"), dtype=dtype, device=weight.device)
    x[:rows].normal_(generator=generator)
    tensor = StateTensor(0, CONVOLUTION, (1, *weight.shape), dtype)
    return compare_steps(
        operations,
        lambda ops, chosen, states: ops.convolve(x[:rows][chosen], states, convolution),
        scattered(tensor, rows, generator),
        TOLERANCE[dtype],
    )


@torch.inference_mode()
def compare_delta(
    operations: LayerOperations,
    delta: GatedDelta,
    dtype: torch.dtype,
    rows: int,
    kept: torch.dtype | None = None,
) -> str:
    """Return how a gated delta rule differs from plain torch, or a row's bits from those alone; "" if they do not."""
    generator = torch.Generator(delta.weight.device).manual_seed(rows)
    given = [_before_nan(rows, width, dtype, generator) for width in delta.widths]
    tensor = StateTensor(0, RECURRENT, delta.state, torch.float32, kept)
    return compare_steps(
        operations,
        lambda ops, chosen, states: ops.advance_delta(DeltaInputs(*(each[chosen] for each in given)), states, delta),
        scattered(tensor, rows, generator),
        TOLERANCE[dtype if kept is None else kept],
    )


@torch.inference_mode()
def compare_state_space(
    operations: LayerOperations,
    space: StateSpace,
    dtype: torch.dtype,
    rows: int,
    kept: torch.dtype | None = None,
) -> str:
    """Return how state spaces differ from plain torch, or a row's bits from those alone; "" if they do not."""
    generator = torch.Generator(space.weight.device).manual_seed(rows)
    widths = (sum(space.parts), len(space.weight), space.heads)
    given = [_before_nan(rows, width, dtype, generator) for width in widths]
    tensor = StateTensor(0, RECURRENT, space.state, torch.float32, kept)

    def advance(operations: LayerOperations, chosen: slice, states: StateRows) -> torch.Tensor:
        return operations.advance_state_space(StateSpaceInputs(*(each[chosen] for each in given)), states, space)

    return compare_steps(
        operations, advance, scattered(tensor, rows, generator), TOLERANCE[dtype if kept is None else kept]
    )


@torch.inference_mode()
def compare_selective(
    operations: LayerOperations,
    space: SelectiveSpace,
    dtype: torch.dtype,
    rows: int,
    kept: torch.dtype | None = None,
) -> str:
    """Return how state spaces differ from plain torch, or a row's bits from those alone; "" if they do not."""
    generator = torch.Generator(space.rates.device).manual_seed(rows)
    dtype = torch.float32 if space.is_wide else dtype
    given = [_before_nan(rows, width, dtype, generator) for width in space.widths]
    tensor = StateTensor(0, RECURRENT, space.state, torch.float32, kept)

    def advance(operations: LayerOperations, chosen: slice, states: StateRows) -> torch.Tensor:
        return operations.advance_selective(SelectiveInputs(*(each[chosen] for each in given)), states, space)

    tolerance = max(TOLERANCE[dtype], 0 if kept is None else TOLERANCE[kept])
    return compare_steps(operations, advance, scattered(tensor, rows, generator), tolerance)


def _before_nan(rows: int, width: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return random numbers [rows, width], with a row of NaN behind them in memory."""
    numbers = torch.full((rows + 1, width), float("nan"), dtype=dtype, device=generator.device)
    numbers[:rows].normal_(generator=generator)
    return numbers[:rows]


def scattered(tensor: StateTensor, rows: int, generator: torch.Generator) -> StateRows:
    """Return random states of several rows, each in a few scattered pages that divide it unevenly."""
    page = tensor.nbytes * 2 // 5
    layout, device = StateLayout((tensor,), max(ALIGNMENT, page + -page % ALIGNMENT)), generator.device
    memory = torch.full(((rows + 1) * layout.pages, layout.page_bytes), 0xFF, dtype=torch.uint8, device=device)
    order = torch.randperm(len(memory), generator=generator, device=device)[: rows * layout.pages]
    states = StatePages(layout, memory).rows(0, tensor.name, order.view(rows, -1).int())
    states.write(torch.randn((rows, *tensor.shape[1:]), generator=generator, device=device).to(tensor.dtype))
    return states


def compare_steps(operations: LayerOperations, advance: Advance, states: StateRows, tolerance: float) -> str:
    """Return how a step differs from plain torch's, or a row's bits from those of the row alone; "" if they do not.

    Args:
        operations: The operations.
        advance: Runs the step of some rows with the states of these, and returns its result.
        states: The states of all rows before the step; as they were afterwards.
        tolerance: The largest difference, relative to the largest number.
    """
    rows, before = len(states.pages), states.memory.clone()

    def run(operations: LayerOperations, chosen: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        part = StateRows(states.memory, states.pages[chosen], states.tensor, states.spans, states.lines)
        result, state, memory = advance(operations, chosen, part), part.read(), states.memory.clone()
        states.memory.copy_(before)
        return result, state, memory

    got, want, last = run(operations, slice(rows)), run(PlainOperations(), slice(rows)), slice(rows - 1, rows)
    for name, ours, plain in zip(("result", "state"), got, want, strict=False):
        difference = float((ours.float() - plain.float()).abs().max() / plain.float().abs().max().clamp_min(1e-6))
        if not difference <= tolerance:
            return f"its {name} differs from the reference by {difference:.1e} of the largest number"
    states.write(torch.zeros_like(want[1]))
    untouched, after = states.memory.clone(), states.memory
    after.copy_(got[2])
    states.write(torch.zeros_like(want[1]))
    if not torch.equal(after, untouched):
        return "it writes outside the states"
    after.copy_(before)
    alone = run(operations, last)
    if not all(torch.equal(one, other[last]) for one, other in zip(alone[:2], got[:2], strict=True)):
        return "a row has other bits alone than among others"
    return ""
