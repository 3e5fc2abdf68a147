"""Layer operations of a CPU: oneDNN's products with packed weights, and Numba kernels between them."""

from __future__ import annotations

import math
from functools import partial

import torch

from kvforge.worker.attention import PagedBatch
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.attention.states import StateRows
from kvforge.worker.cpu.convolution_kernel import CHANNELS_PER_US, convolve
from kvforge.worker.cpu.delta_kernel import NUMBERS_PER_US as STATE_NUMBERS_PER_US
from kvforge.worker.cpu.delta_kernel import advance_delta
from kvforge.worker.cpu.kernel import threads_for
from kvforge.worker.cpu.layer_kernels import NUMBERS_PER_US, add_norm, embed_norm, gate, head_norm, norm
from kvforge.worker.cpu.selective_kernel import NUMBERS_PER_US as SELECTIVE_NUMBERS_PER_US
from kvforge.worker.cpu.selective_kernel import advance_selective
from kvforge.worker.cpu.state_space_kernel import advance_state_space
from kvforge.worker.cpu.vector import CODES
from kvforge.worker.device.device import Device

from .activations import SILU, Activation
from .cpu_decoder import CpuDecoder, can_decode, is_decodes
from .cpu_prompts import CpuPrompts, finished
from .interface import DecoderParts
from .layer_weights import Norm
from .packed import PackedOperations
from .packed_table import PackedTable
from .plain import sum_parts
from .prompt_rows import PromptRows
from .recurrent import Convolution, DeltaInputs, GatedDelta, PromptForm
from .selective import SelectiveInputs, SelectiveSpace
from .state_space import StateSpace, StateSpaceInputs
from .tiles import Layouts


class CpuOperations(PackedOperations):
    """Operations on CPU kernels; see LayerOperations."""

    kernels = ("embedding norm", "head norm", "gate", "sum and norm", "sum and norm of attention", "norm")

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._decoder: CpuDecoder | None = None
        self._layouts = Layouts(device)

    def _look_at(self, packed: torch.Tensor, weight: torch.Tensor) -> None:
        self._layouts.find(packed, weight)

    def decode(
        self,
        decoder: DecoderParts,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: PagedBatch,
        pool: KvPool,
    ) -> torch.Tensor | None:
        """Implement `LayerOperations.decode`."""
        if not is_decodes(batch, token_ids):
            return None
        if self._decoder is None or not self._decoder.serves(decoder, pool):
            self._decoder = CpuDecoder(decoder, pool) if can_decode(decoder, pool) else None
        return None if self._decoder is None else self._decoder.run(token_ids, positions, batch)

    def embed(
        self, tokens: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement `LayerOperations.embed`."""
        rows, count = len(tokens), table.shape[1]
        if isinstance(table, PackedTable):
            table, tokens = table.rows(tokens), torch.arange(rows)
        if not (tokens.is_contiguous() and tokens.dtype == torch.int64 and _same(table, weight)):
            return super().embed(tokens, table, weight, epsilon)
        residual, normed = torch.empty((2, rows, count), dtype=table.dtype).unbind()
        embed_norm(
            _threads(residual),
            tokens=tokens.data_ptr(),
            table=table.data_ptr(),
            weight=weight.data_ptr(),
            residual=residual.data_ptr(),
            normed=normed.data_ptr(),
            rows=rows,
            count=count,
            code=CODES[table.dtype],
            epsilon=epsilon,
        )
        return residual, normed

    def add_norm(
        self, addend: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Implement `LayerOperations.add_norm`."""
        added = addend[0] if len(addend) == 1 else sum_parts(addend, residual.dtype)
        if not _same(added, residual, weight):
            return super().add_norm(addend, residual, weight, epsilon)
        normed = torch.empty_like(residual)
        add_norm(
            _threads(residual),
            addend=added.data_ptr(),
            residual=residual.data_ptr(),
            weight=weight.data_ptr(),
            normed=normed.data_ptr(),
            rows=residual.shape[0],
            count=residual.shape[1],
            code=CODES[residual.dtype],
            epsilon=epsilon,
        )
        return normed

    def head_norm(
        self,
        projected: torch.Tensor,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        heads: int,
        kv_heads: int,
        epsilon: float,
    ) -> None:
        """Implement `LayerOperations.head_norm`."""
        if not _same(projected, query_weight, key_weight):
            super().head_norm(projected, query_weight, key_weight, heads, kv_heads, epsilon)
            return
        head_norm(
            _threads(projected),
            projected=projected.data_ptr(),
            stride=projected.stride(0) * projected.itemsize,
            query_weight=query_weight.data_ptr(),
            key_weight=key_weight.data_ptr(),
            rows=len(projected),
            heads=heads,
            kv_heads=kv_heads,
            size=len(query_weight),
            code=CODES[projected.dtype],
            epsilon=epsilon,
        )

    def norm(self, x: torch.Tensor, norm: Norm, output: torch.Tensor | None = None) -> torch.Tensor:
        """Implement `LayerOperations.norm`."""
        if not _can_normalise(norm, x) or (output is not None and not _can_normalise(norm, output)):
            return super().norm(x, norm, output)
        if output is None:
            output = torch.empty(x.shape, dtype=x.dtype)
        rows, target = (each if each.dim() == 3 else each[:, None] for each in (x, output))
        _normalise(rows, target, norm, norm.weight, rows.shape[1], 0)
        return output

    def norm_heads(self, projected: torch.Tensor, query: Norm, key: Norm, heads: int, kv_heads: int) -> None:
        """Implement `LayerOperations.norm_heads`."""
        if not (_can_normalise(query, projected) and _can_normalise(key, projected)):
            super().norm_heads(projected, query, key, heads, kv_heads)
            return
        by_head = projected.unflatten(1, (-1, len(query.weight)))
        _normalise(by_head, by_head, query, key.weight, heads, kv_heads)

    def gated(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: Activation = SILU,
    ) -> torch.Tensor:
        """Implement `LayerOperations.gated`."""
        if activation != SILU:
            return super().gated(x, weight, bias, activation)
        both = self.product(x, weight, bias)
        if not _same(both):
            both = both.contiguous()
        rows, count = both.shape
        found = torch.empty((rows, count // 2), dtype=both.dtype)
        gate(
            _threads(both),
            source=both.data_ptr(),
            stride=both.stride(0) * both.itemsize,
            target=found.data_ptr(),
            rows=rows,
            count=count // 2,
            code=CODES[both.dtype],
        )
        return found

    def convolve(self, x: torch.Tensor, states: StateRows, convolution: Convolution) -> torch.Tensor:
        """Implement `StateOperations.convolve`."""
        weight, bias, lines, state = convolution.weight, convolution.bias, states.lines, states.tensor
        alike = all(each is None or (each.is_contiguous() and each.dtype == x.dtype) for each in (weight, bias))
        if lines is None or not alike or x.dtype not in CODES or x.stride(1) != 1 or state.stored not in CODES:
            return super().convolve(x, states, convolution)
        rows, (channels, taps) = len(x), weight.shape
        found = torch.empty((rows, channels), dtype=x.dtype)
        convolve(
            threads_for(rows * channels / CHANNELS_PER_US),
            x=x.data_ptr(),
            stride=x.stride(0) * x.itemsize,
            target=found.data_ptr(),
            weight=weight.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            rows=rows,
            channels=channels,
            taps=taps,
            code=CODES[x.dtype],
            memory=states.memory.data_ptr(),
            page_bytes=states.memory.stride(0),
            pages=states.pages.data_ptr(),
            page_count=states.pages.shape[1],
            lines=lines.data_ptr(),
            state_code=CODES[state.stored],
            gated=int(convolution.is_gated),
            silu=int(convolution.has_silu),
        )
        return found

    def advance_delta(self, inputs: DeltaInputs, states: StateRows, delta: GatedDelta) -> torch.Tensor:
        """Implement `StateOperations.advance_delta`."""
        mixed, state, lines = inputs.mixed, states.tensor, states.lines
        given = (mixed, inputs.gate, inputs.beta, inputs.decay)
        alike = all(each.dtype == mixed.dtype and each.stride(1) == 1 for each in given)
        alike &= delta.weight.dtype == mixed.dtype and delta.weight.is_contiguous()
        if lines is None or not alike or mixed.dtype not in CODES or state.stored not in CODES:
            return super().advance_delta(inputs, states, delta)
        rows, heads, size = len(mixed), delta.value_heads, mixed.itemsize
        found = torch.empty((rows, heads * delta.value_size), dtype=mixed.dtype)
        decays = torch.empty((rows, heads, delta.key_size)) if delta.is_by_channel else None
        head_bytes = delta.key_size * delta.value_size * state.stored.itemsize
        advance_delta(
            threads_for(rows * math.prod(delta.state) / STATE_NUMBERS_PER_US),
            mixed=mixed.data_ptr(),
            stride=mixed.stride(0) * size,
            gate=inputs.gate.data_ptr(),
            gate_stride=inputs.gate.stride(0) * size,
            beta=inputs.beta.data_ptr(),
            beta_stride=inputs.beta.stride(0) * size,
            decay=inputs.decay.data_ptr(),
            decay_stride=inputs.decay.stride(0) * size,
            rates=delta.rates.data_ptr(),
            biases=delta.biases.data_ptr(),
            weight=delta.weight.data_ptr(),
            target=found.data_ptr(),
            rows=rows,
            heads=heads,
            groups=delta.groups,
            key_size=delta.key_size,
            value_size=delta.value_size,
            code=CODES[mixed.dtype],
            memory=states.memory.data_ptr(),
            page_bytes=states.memory.stride(0),
            pages=states.pages.data_ptr(),
            page_count=states.pages.shape[1],
            lines=lines.data_ptr(),
            whole=int(state.unit_bytes(states.memory.shape[1]) == head_bytes),
            state_code=CODES[state.stored],
            epsilon=delta.epsilon,
            decays=0 if decays is None else decays.data_ptr(),
            sigmoid=int(delta.has_sigmoid),
        )
        return found

    def advance_state_space(self, inputs: StateSpaceInputs, states: StateRows, space: StateSpace) -> torch.Tensor:
        """Implement `StateOperations.advance_state_space`."""
        mixed, state, lines, weight = inputs.mixed, states.tensor, states.lines, space.weight
        given = (mixed, inputs.gate, inputs.time_steps)
        alike = all(each.dtype == mixed.dtype and each.stride(1) == 1 for each in given)
        alike &= weight.dtype == mixed.dtype and weight.is_contiguous()
        if lines is None or not alike or mixed.dtype not in CODES or state.stored not in CODES:
            return super().advance_state_space(inputs, states, space)
        rows, size, code = len(mixed), mixed.itemsize, CODES[mixed.dtype]
        gated = torch.empty((rows, len(weight)))
        rounded = torch.empty_like(gated, dtype=mixed.dtype)
        head_bytes = space.head_size * space.state_size * state.stored.itemsize
        advance_state_space(
            threads_for(rows * math.prod(space.state) / STATE_NUMBERS_PER_US),
            mixed=mixed.data_ptr(),
            stride=mixed.stride(0) * size,
            gate=inputs.gate.data_ptr(),
            gate_stride=inputs.gate.stride(0) * size,
            steps=inputs.time_steps.data_ptr(),
            steps_stride=inputs.time_steps.stride(0) * size,
            rates=space.rates.data_ptr(),
            biases=space.biases.data_ptr(),
            skips=space.skips.data_ptr(),
            target=gated.data_ptr(),
            rounded=rounded.data_ptr(),
            rows=rows,
            heads=space.heads,
            groups=space.groups,
            head_size=space.head_size,
            state_size=space.state_size,
            code=code,
            memory=states.memory.data_ptr(),
            page_bytes=states.memory.stride(0),
            pages=states.pages.data_ptr(),
            page_count=states.pages.shape[1],
            lines=lines.data_ptr(),
            whole=int(state.unit_bytes(states.memory.shape[1]) == head_bytes),
            state_code=CODES[state.stored],
        )
        return finished(gated, space, mixed.dtype)

    def advance_selective(self, inputs: SelectiveInputs, states: StateRows, space: SelectiveSpace) -> torch.Tensor:
        """Implement `StateOperations.advance_selective`."""
        found = _scan(inputs, states, space, None)
        return super().advance_selective(inputs, states, space) if found is None else found

    def for_prompts(self, _dtype: torch.dtype) -> PromptForm | None:
        """Implement `StateOperations.for_prompts`."""
        return partial(CpuPrompts, _scan)

    def for_token_prompts(self, dtype: torch.dtype) -> PromptForm | None:
        """Implement `StateOperations.for_token_prompts`."""
        return self.for_prompts(dtype)


def _scan(
    inputs: SelectiveInputs, states: StateRows, space: SelectiveSpace, prompts: PromptRows | None
) -> torch.Tensor | None:
    """Advance selective state spaces over the tokens of prompt rows, or by one token of each row; None: no kernel."""
    x, state, lines = inputs.x, states.tensor, states.lines
    alike = all(each.dtype == x.dtype and each.stride(1) == 1 for each in inputs.parts)
    if lines is None or not alike or x.dtype not in CODES or state.stored not in CODES:
        return None
    names, size = ("x", "gate", "steps", "b", "c"), x.itemsize
    pointers = {name: each.data_ptr() for name, each in zip(names, inputs.parts, strict=True)}
    strides = {f"{name}_stride": size * each.stride(0) for name, each in zip(names, inputs.parts, strict=True)}
    found = torch.empty((len(x), space.channels), dtype=x.dtype)
    advance_selective(
        threads_for(len(x) * math.prod(space.state) / SELECTIVE_NUMBERS_PER_US),
        **pointers,
        **strides,
        rates=space.rates.data_ptr(),
        biases=space.biases.data_ptr(),
        skips=space.skips.data_ptr(),
        target=found.data_ptr(),
        rows=len(states.pages),
        channels=space.channels,
        state_size=space.state_size,
        code=CODES[x.dtype],
        memory=states.memory.data_ptr(),
        page_bytes=states.memory.stride(0),
        pages=states.pages.data_ptr(),
        page_count=states.pages.shape[1],
        lines=lines.data_ptr(),
        state_code=CODES[state.stored],
        table=0 if prompts is None else prompts.rows.data_ptr(),
    )
    return found


def _can_normalise(norm: Norm, x: torch.Tensor) -> bool:
    """Return whether the kernel computes a norm of x: a root mean square without a bias."""
    is_plain = norm.bias is None and not norm.centred and norm.weight.is_contiguous()
    return is_plain and x.dim() in (2, 3) and x.stride(-1) == 1 and x.dtype == norm.weight.dtype and x.dtype in CODES


def _normalise(
    source: torch.Tensor, target: torch.Tensor, like: Norm, key_weight: torch.Tensor, heads: int, key_heads: int
) -> None:
    """Normalise [rows, heads, n]: the first `heads` with the weight of `like`, the next `key_heads` with key_weight."""
    size = source.itemsize
    norm(
        _threads(source),
        source=source.data_ptr(),
        stride=source.stride(0) * size,
        head_stride=source.stride(1) * size,
        target=target.data_ptr(),
        target_stride=target.stride(0) * size,
        into_stride=target.stride(1) * size,
        weight=like.weight.data_ptr(),
        key_weight=key_weight.data_ptr(),
        rows=len(source),
        heads=heads,
        key_heads=key_heads,
        size=source.shape[2],
        code=CODES[source.dtype],
        rounds_first=int(like.rounds_first),
        epsilon=like.epsilon,
        offset=like.offset,
    )


def _same(first: torch.Tensor, *others: torch.Tensor) -> bool:
    """Return whether the tensors are contiguous and share one dtype, as the kernels require."""
    return first.is_contiguous() and all(each.is_contiguous() and each.dtype == first.dtype for each in others)


def _threads(numbers: torch.Tensor) -> int:
    return threads_for(numbers.numel() / NUMBERS_PER_US)
