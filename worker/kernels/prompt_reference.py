"""Layers with a recurrent state over prompt tokens, in plain torch: the reference of the kernels of chunks.

The chunked form of the gated delta rule computes a chunk's tokens from the state before the chunk by matrix products
(arXiv 2412.06464, section 3.3): with the tokens as rows, and the products of their decays in `pairs`, the corrections
that the tokens make are the solution of a unit lower triangular system. With a decay of each number of a key
(arXiv 2510.26692, section 3), the products of keys and queries are sums over numbers that have decayed differently.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad, silu, softplus

from kvforge.worker.attention.states import StateRows

from .plain import log_decays, norm_with_gate
from .prompt_rows import CHUNK, PromptRows
from .recurrent import SUM_MIN, Convolution, DeltaInputs, GatedDelta
from .selective import SelectiveInputs, SelectiveSpace, advance_token
from .state_space import StateSpace, StateSpaceInputs, finish


class PlainPrompts:
    """`StateOperations` over the tokens of prompt rows, row by row and chunk by chunk.

    Inputs have all tokens of a step, and results too: those of tokens outside the rows are undefined. A state is
    rounded to the dtype of its pages behind every chunk.

    Args:
        rows: The rows.
    """

    def __init__(self, rows: PromptRows) -> None:
        self._rows = rows

    def for_prompts(self, _dtype: torch.dtype) -> None:
        """Return None: these are the operations over prompts."""

    def for_token_prompts(self, _dtype: torch.dtype) -> None:
        """Return None, as `for_prompts`."""

    def begins(self, x: torch.Tensor) -> torch.Tensor:
        """Implement `StateOperations.begins`."""
        return self._rows.begins(x)

    def convolve(self, x: torch.Tensor, states: StateRows, convolution: Convolution) -> torch.Tensor:
        """Implement `StateOperations.convolve`."""
        weight, taps = convolution.weight.float(), convolution.weight.shape[1]
        found, after = torch.zeros((len(x), len(weight)), dtype=x.dtype, device=x.device), list[torch.Tensor]()
        for row, state in enumerate(states_before(states, self._rows)):
            held = state.t()
            for begin, end in self._rows.chunks(row):
                place = self._place(row, begin, end)
                given, gate = _padded(x[place]), None
                if convolution.is_gated:
                    factor, gate, given = given.chunk(3, dim=1)
                    given = factor * given
                inputs = torch.cat((held, given.to(held.dtype)))
                total = torch.zeros(given.shape, device=x.device)
                for tap in range(taps):
                    total = total + weight[:, tap] * inputs[tap + 1 : tap + 1 + CHUNK].float()
                if convolution.bias is not None:
                    total = total + convolution.bias.float()
                mixed = total.to(x.dtype)
                mixed = silu(mixed) if convolution.has_silu else mixed
                found[place] = (mixed if gate is None else gate * mixed)[: end - begin]
                held = inputs[end - begin : end - begin + taps].to(states.tensor.stored).to(held.dtype)
            after.append(held.t())
        states.write(torch.stack(after))
        return found

    def advance_delta(self, inputs: DeltaInputs, states: StateRows, delta: GatedDelta) -> torch.Tensor:
        """Implement `StateOperations.advance_delta`."""
        mixed, heads, after = inputs.mixed, delta.value_heads, list[torch.Tensor]()
        found = torch.zeros((len(mixed), heads * delta.value_size), dtype=mixed.dtype, device=mixed.device)
        sizes = (delta.key_size, delta.key_size, delta.value_size)
        for row, state in enumerate(states_before(states, self._rows)):
            held = state.float()
            for begin, end in self._rows.chunks(row):
                place, count = self._place(row, begin, end), end - begin
                query, key, value = (
                    part.float().unflatten(1, (-1, size)).transpose(0, 1)
                    for part, size in zip(_padded(mixed[place]).split(delta.parts, 1), sizes, strict=True)
                )
                query, key = (_of_length_1(each).repeat_interleave(delta.groups, 0) for each in (query, key))
                decay = log_decays(_padded(inputs.decay[place]), delta)
                beta = _padded(inputs.beta[place]).sigmoid().float()
                decay[count:], beta[count:] = 0, 0  # the places behind change nothing
                query = query / delta.key_size**0.5
                result, held = advance_chunk(query, key, value, decay.transpose(0, 1), beta.t(), held)
                held = held.to(states.tensor.stored).float()
                result = result.transpose(0, 1).to(mixed.dtype)
                found[place] = norm_with_gate(result, _padded(inputs.gate[place]), delta).flatten(1)[:count]
            after.append(held)
        states.write(torch.stack(after))
        return found

    def advance_state_space(self, inputs: StateSpaceInputs, states: StateRows, space: StateSpace) -> torch.Tensor:
        """Implement `StateOperations.advance_state_space`."""
        mixed, repeats, after = inputs.mixed, space.heads // space.groups, list[torch.Tensor]()
        found = torch.zeros((len(mixed), len(space.weight)), dtype=mixed.dtype, device=mixed.device)
        for row, state in enumerate(states_before(states, self._rows)):
            held = state.float()
            for begin, end in self._rows.chunks(row):
                place, count = self._place(row, begin, end), end - begin
                x, *shared = _padded(mixed[place]).float().split(space.parts, 1)
                x = x.unflatten(1, (space.heads, -1)).transpose(0, 1)
                b, c = (
                    each.unflatten(1, (space.groups, -1)).transpose(0, 1).repeat_interleave(repeats, 0)
                    for each in shared
                )
                step = softplus(_padded(inputs.time_steps[place]).float() + space.biases).clamp(*space.limits)
                step[count:] = 0  # the places behind change nothing
                result, held = advance_spaces(x, b, c, step.t(), space.rates, held)
                held = held.to(states.tensor.stored).float()
                result = (result + space.skips[:, None, None] * x).transpose(0, 1).to(mixed.dtype).float().flatten(1)
                gated = result * silu(_padded(inputs.gate[place]).float())
                found[place] = finish(gated, space, mixed.dtype)[:count]
            after.append(held)
        states.write(torch.stack(after))
        return found

    def advance_selective(self, inputs: SelectiveInputs, states: StateRows, space: SelectiveSpace) -> torch.Tensor:
        """Implement `StateOperations.advance_selective`, token by token."""
        found, after = torch.zeros_like(inputs.x, memory_format=torch.contiguous_format), list[torch.Tensor]()
        for row, state in enumerate(states_before(states, self._rows)):
            held, first = state.float(), int(self._rows.firsts[row])
            for token in range(first, first + int(self._rows.counts[row])):
                found[token], held = advance_token(inputs, token, held, space)
                held = held.to(states.tensor.stored).float()
            after.append(held)
        states.write(torch.stack(after))
        return found

    def _place(self, row: int, begin: int, end: int) -> slice:
        """Return where a row's tokens [begin, end) are among the tokens of the step."""
        first = int(self._rows.firsts[row])
        return slice(first + begin, first + end)


def _padded(tokens: torch.Tensor) -> torch.Tensor:
    """Return the tokens of a chunk with zeros behind, because a sum's order depends on the shape of its tensor."""
    return pad(tokens, (0, 0, 0, CHUNK - len(tokens)))


def advance_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the tokens of a chunk. All float32.

    Args:
        query: [heads, tokens, key_size], of length 1 / root of key_size.
        key: [heads, tokens, key_size], of length 1.
        value: [heads, tokens, value_size].
        decay: [heads, tokens, 1 or key_size], logarithms.
        beta: [heads, tokens].
        state: [heads, key_size, value_size].

    Returns:
        The results [heads, tokens, value_size], and the state behind the chunk.
    """
    total = decay.cumsum(1)
    system = _pairs(beta[..., None] * key, key, total)
    wanted = torch.cat((value, total.exp() * key), dim=2) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    added, known = solved.split((value.shape[2], key.shape[2]), dim=2)
    added = added - known @ state
    found = (query * total.exp()) @ state + _pairs(query, key, total) @ added
    left = key * (total[:, -1:] - total).exp()
    return found, state * total[:, -1].exp()[..., None] + left.transpose(1, 2) @ added


def _pairs(left: torch.Tensor, key: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return the products of each token and the keys before it, times the decays between them.

    Args:
        left: [heads, tokens, key_size].
        key: The same.
        total: [heads, tokens, 1 or key_size], sums of logarithms of decays.

    Returns:
        [heads, tokens, tokens], 0 for keys of later tokens.
    """
    if total.shape[2] == 1:
        apart = (total - total.transpose(1, 2)).tril().exp().tril()
        return left @ key.transpose(1, 2) * apart
    later = torch.ones(total.shape[1], total.shape[1], dtype=torch.bool, device=total.device).triu(1)
    decays = (total[:, :, None] - total[:, None]).masked_fill(later[..., None], -torch.inf).exp()
    return (left[:, :, None] * key[:, None] * decays).sum(3)


def advance_spaces(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, step: torch.Tensor, rates: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the tokens of a chunk of state spaces by matrix products (arXiv 2405.21060, section 6). All float32.

    Args:
        x: [heads, tokens, head_size].
        b: [heads, tokens, state_size].
        c: [heads, tokens, state_size].
        step: [heads, tokens]; 0: the token changes nothing.
        rates: [heads].
        state: [heads, head_size, state_size].

    Returns:
        y without the skip, [heads, tokens, head_size], and the state behind the chunk.
    """
    total = (rates[:, None] * step).cumsum(1)
    pairs = (total[:, :, None] - total[:, None]).tril().exp().tril() * (c @ b.transpose(1, 2)) * step[:, None]
    found = pairs @ x + total.exp()[..., None] * (c @ state.transpose(1, 2))
    left = b * (step * (total[:, -1:] - total).exp())[..., None]
    return found, state * total[:, -1].exp()[:, None, None] + x.transpose(1, 2) @ left


def states_before(states: StateRows, rows: PromptRows) -> torch.Tensor:
    """Return the states of rows before the step: zeros where a row begins."""
    begins = torch.from_numpy(rows.starts == 0).to(states.memory.device)
    state = states.read()
    return state.masked_fill(begins.view(-1, *(1,) * (state.dim() - 1)), 0)


def _of_length_1(heads: torch.Tensor) -> torch.Tensor:
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + SUM_MIN)
