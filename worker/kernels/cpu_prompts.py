"""The operations of layers with a recurrent state over prompt tokens, by CPU kernels that go token by token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from kvforge.worker.attention.states import StateRows
from kvforge.worker.cpu.delta_kernel import INPUTS_PER_US as DELTA_INPUTS_PER_US
from kvforge.worker.cpu.delta_kernel import finish_delta, prepare_delta
from kvforge.worker.cpu.kernel import threads_for
from kvforge.worker.cpu.prompt_convolution_kernel import CHANNELS_PER_US, TOKENS, convolve_prompts
from kvforge.worker.cpu.prompt_kernel import COLUMNS, NUMBERS_PER_US, advance_prompts
from kvforge.worker.cpu.state_space_kernel import INPUTS_PER_US as SPACE_INPUTS_PER_US
from kvforge.worker.cpu.state_space_kernel import finish_spaces, group_norm, prepare_spaces
from kvforge.worker.cpu.vector import CODES

from .prompt_reference import PlainPrompts, states_before
from .prompt_rows import PromptRows
from .recurrent import Convolution, DeltaInputs, GatedDelta
from .selective import SelectiveInputs, SelectiveSpace
from .state_space import StateSpace, StateSpaceInputs

Scan = Callable[[SelectiveInputs, StateRows, SelectiveSpace, PromptRows], torch.Tensor | None]
OF_SPACES, OF_HEADS, OF_LINES = range(3)  # decays of `advance_prompts`


class CpuPrompts(PlainPrompts):
    """`StateOperations` over the tokens of prompt rows; `PlainPrompts` where a kernel does not take the inputs.

    A chunk in plain torch takes as long as transformers' modules. Here a state advances by one token after the other,
    some of its columns at a time, which stay in the first cache.

    Args:
        scan: Computes selective state spaces over rows; None in place of a result: it has no kernel for them.
        rows: The rows.
    """

    def __init__(self, scan: Scan, rows: PromptRows) -> None:
        super().__init__(rows)
        self._scan = scan

    def convolve(self, x: torch.Tensor, states: StateRows, convolution: Convolution) -> torch.Tensor:
        """Implement `StateOperations.convolve`."""
        if x.dtype not in CODES or x.stride(1) != 1 or states.tensor.stored not in CODES:
            return super().convolve(x, states, convolution)
        channels, taps = convolution.weight.shape
        factors = convolution.weight.float().t().contiguous()
        bias = None if convolution.bias is None else convolution.bias.float().contiguous()
        before = states_before(states, self._rows).float().view(-1, channels, taps).transpose(1, 2).contiguous()
        found, after = torch.empty((len(x), channels), dtype=x.dtype), torch.empty_like(before)
        rounds = states.tensor.stored != states.tensor.dtype
        convolve_prompts(
            threads_for(len(x) * channels / CHANNELS_PER_US),
            x=x.data_ptr(),
            stride=x.stride(0) * x.itemsize,
            target=found.data_ptr(),
            factors=factors.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            table=self._rows.rows.data_ptr(),
            rows=len(before),
            tickets=-(-int(self._rows.counts.max()) // TOKENS),
            channels=channels,
            taps=taps,
            code=CODES[x.dtype],
            state_code=CODES[states.tensor.stored if rounds else torch.float32],
            gated=int(convolution.is_gated),
            silu=int(convolution.has_silu),
            before=before.data_ptr(),
            after=after.data_ptr(),
        )
        states.write(after.transpose(1, 2).reshape(-1, *states.tensor.shape[1:]).to(states.tensor.dtype))
        return found

    def advance_delta(self, inputs: DeltaInputs, states: StateRows, delta: GatedDelta) -> torch.Tensor:
        """Implement `StateOperations.advance_delta`."""
        mixed, weight = inputs.mixed, delta.weight
        given = (mixed, inputs.gate, inputs.beta, inputs.decay)
        if not _are_rows(given) or weight.dtype != mixed.dtype or not weight.is_contiguous():
            return super().advance_delta(inputs, states, delta)
        tokens, heads, size, by_line = len(mixed), delta.value_heads, mixed.itemsize, delta.is_by_channel
        held = _Held(tokens, heads, delta.key_heads, delta.key_size, delta.value_size, by_line)
        threads = threads_for(mixed.numel() / DELTA_INPUTS_PER_US)
        known = torch.empty_like(held.decays) if by_line else None
        prepare_delta(
            threads,
            mixed=mixed.data_ptr(),
            stride=mixed.stride(0) * size,
            beta=inputs.beta.data_ptr(),
            beta_stride=inputs.beta.stride(0) * size,
            decay=inputs.decay.data_ptr(),
            decay_stride=inputs.decay.stride(0) * size,
            rates=delta.rates.data_ptr(),
            biases=delta.biases.data_ptr(),
            tokens=tokens,
            heads=heads,
            groups=delta.groups,
            key_size=delta.key_size,
            value_size=delta.value_size,
            width=held.width,
            code=CODES[mixed.dtype],
            known=0 if known is None else known.data_ptr(),
            **held.addresses,
        )
        state = states_before(states, self._rows).float()
        result, after = self._advanced(held, state, states, OF_LINES if by_line else OF_HEADS, known)
        states.write(after)
        found = torch.empty((tokens, heads * delta.value_size), dtype=mixed.dtype)
        finish_delta(
            threads,
            source=result.data_ptr(),
            target=found.data_ptr(),
            gate=inputs.gate.data_ptr(),
            gate_stride=inputs.gate.stride(0) * size,
            weight=weight.data_ptr(),
            tokens=tokens,
            heads=heads,
            value_size=delta.value_size,
            width=held.width,
            code=CODES[mixed.dtype],
            sigmoid=int(delta.has_sigmoid),
            epsilon=delta.epsilon,
        )
        return found

    def advance_state_space(self, inputs: StateSpaceInputs, states: StateRows, space: StateSpace) -> torch.Tensor:
        """Implement `StateOperations.advance_state_space`."""
        mixed, weight = inputs.mixed, space.weight
        given = (mixed, inputs.gate, inputs.time_steps)
        if not _are_rows(given) or weight.dtype != mixed.dtype or not weight.is_contiguous():
            return super().advance_state_space(inputs, states, space)
        tokens, heads, size, code = len(mixed), space.heads, mixed.itemsize, CODES[mixed.dtype]
        held = _Held(tokens, heads, space.groups, space.state_size, space.head_size)
        threads = threads_for(mixed.numel() / SPACE_INPUTS_PER_US)
        prepare_spaces(
            threads,
            mixed=mixed.data_ptr(),
            stride=mixed.stride(0) * size,
            steps=inputs.time_steps.data_ptr(),
            steps_stride=inputs.time_steps.stride(0) * size,
            rates=space.rates.data_ptr(),
            biases=space.biases.data_ptr(),
            tokens=tokens,
            heads=heads,
            groups=space.groups,
            head_size=space.head_size,
            state_size=space.state_size,
            width=held.width,
            code=code,
            least=space.limits[0],
            most=space.limits[1],
            **held.addresses,
        )
        state = states_before(states, self._rows).float().transpose(2, 3)
        result, after = self._advanced(held, state, states, OF_SPACES)
        states.write(after.transpose(2, 3))
        gated = torch.empty((tokens, heads * space.head_size))
        finish_spaces(
            threads,
            source=result.data_ptr(),
            target=gated.data_ptr(),
            mixed=mixed.data_ptr(),
            stride=mixed.stride(0) * size,
            gate=inputs.gate.data_ptr(),
            gate_stride=inputs.gate.stride(0) * size,
            skips=space.skips.data_ptr(),
            tokens=tokens,
            heads=heads,
            head_size=space.head_size,
            width=held.width,
            code=code,
        )
        return finished(gated, space, mixed.dtype)

    def advance_selective(self, inputs: SelectiveInputs, states: StateRows, space: SelectiveSpace) -> torch.Tensor:
        """Implement `StateOperations.advance_selective`."""
        found = self._scan(inputs, states, space, self._rows)
        return super().advance_selective(inputs, states, space) if found is None else found

    def _advanced(
        self, held: _Held, state: torch.Tensor, states: StateRows, kind: int, known: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Advance states through all tokens of their rows.

        Args:
            held: The inputs.
            state: [rows, heads, key_size, value_size] float32.
            states: Has the dtype of the pages.
            kind: See `advance_prompts`.
            known: The keys with the decays of lines in them; None: without decays of lines.

        Returns:
            The results [tokens, heads, width] float32, and the states behind the rows, as `state`.
        """
        rows, heads, key_size, value_size = state.shape
        strips = held.width // COLUMNS
        padded = pad(state, (0, held.width - value_size)).view(rows, heads, key_size, strips, COLUMNS)
        work = padded.transpose(2, 3).contiguous()
        result = torch.empty_like(held.values)
        advance_prompts(
            threads_for(len(result) * heads * key_size * value_size / NUMBERS_PER_US),
            **held.addresses,
            known=(held.keys if known is None else known).data_ptr(),
            target=result.data_ptr(),
            states=work.data_ptr(),
            table=self._rows.rows.data_ptr(),
            rows=rows,
            heads=heads,
            groups=heads // held.keys.shape[1],
            key_size=key_size,
            width=held.width,
            state_code=CODES[states.tensor.stored],
            kind=kind,
        )
        return result, work.transpose(2, 3).reshape(rows, heads, key_size, held.width)[..., :value_size]


class _Held:
    """The inputs of `advance_prompts`, float32.

    Attributes:
        width: Numbers of a value, with those that fill its last strip.
        queries: [tokens, key heads, key_size].
        keys: The same.
        values: [tokens, heads, width].
        decays: [tokens, heads], or [tokens, heads, key_size] by line.
        factors: [tokens, heads].
    """

    def __init__(
        self, tokens: int, heads: int, key_heads: int, key_size: int, value_size: int, by_line: bool = False
    ) -> None:
        self.width = -(-value_size // COLUMNS) * COLUMNS
        self.queries, self.keys = torch.empty((2, tokens, key_heads, key_size)).unbind()
        self.values = (torch.empty if self.width == value_size else torch.zeros)(tokens, heads, self.width)
        self.decays = torch.empty((tokens, heads, key_size) if by_line else (tokens, heads))
        self.factors = torch.empty((tokens, heads))

    @property
    def addresses(self) -> dict[str, int]:
        """Their addresses by the kernels' names."""
        names = ("queries", "keys", "values", "decays", "factors")
        return {name: getattr(self, name).data_ptr() for name in names}


def finished(gated: torch.Tensor, space: StateSpace, dtype: torch.dtype) -> torch.Tensor:
    """Compute `state_space.finish` by a kernel, on y silu(gate) [tokens, heads x head_size] float32."""
    found = torch.empty_like(gated, dtype=dtype)
    if not space.normalises:
        return found.copy_(gated)
    group_norm(
        threads_for(gated.numel() / SPACE_INPUTS_PER_US),
        source=gated.data_ptr(),
        target=found.data_ptr(),
        weight=space.weight.data_ptr(),
        rows=len(gated),
        groups=space.groups,
        count=len(space.weight) // space.groups,
        code=CODES[dtype],
        epsilon=space.epsilon,
    )
    return found


def _are_rows(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Return whether kernels take these inputs: contiguous rows of one dtype."""
    dtype = tensors[0].dtype
    return dtype in CODES and all(each.dtype == dtype and each.stride(1) == 1 for each in tensors)
