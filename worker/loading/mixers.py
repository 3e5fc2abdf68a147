"""Layers with a recurrent state: transformers' own modules, bound to the pages of the pool.

A *mixer* is a module that mixes the tokens of a sequence through a state of fixed size: a short convolution, a gated
delta rule, Mamba. transformers keeps the state in a cache that the mixer is given. Here each row of a step is given to
the mixer alone, with a cache that holds the row's state, read from its pages before and written back behind it. A row's
bits therefore do not depend on other rows. Generated tokens run through kernels of our own instead, all rows together,
if the mixer's step is described (`mixer_steps`). So do prompts in described decoders, on a CPU and most GPUs
(`mixer_prompts`).

A mixer has two forms, which round differently: one for a chunk of tokens, and one for a single token behind a state.
Prompt tokens are cut at absolute multiples of the chunk size, so that a prompt always runs through the same calls,
however it was scheduled; each generated token runs alone. The last chunk of a prompt may be incomplete: its state comes
from its own tokens, and its results from a chunk of full length, so that a block of K and V has the same bits behind
prompts of any length (`_last_chunk`). transformers' Mamba 1 cannot continue a state with several tokens: there, each
token of a prompt runs alone too.
"""

from __future__ import annotations

import ast
import inspect
import math
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Self, cast

import torch
import transformers

from kvforge.protocol.errors import UnsupportedModel, WorkerError
from kvforge.worker.attention import PagedBatch
from kvforge.worker.attention.mixed_batch import MixedBatch
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.attention.states import StateRows, StateTensor
from kvforge.worker.kernels.recurrent import MixerStep, StepOperations, form_of_prompts

from .forward_context import ForwardContext
from .mixer_prompts import ChunkedPrompts, Described, prompts_of
from .mixer_steps import step_of
from .mixer_waves import waves
from .own_states import own_state_of
from .projections import JoinedTokens, ProjectionFinder, Projections
from .row_cache import RowCache

DEFAULT_CHUNK = 64  # transformers' own, for gated delta rules
MIXING = "kvforge_mixing"
RECURRENT = "update_recurrent_state("
CALLS = ("update_conv_state(", RECURRENT)
CONTINUES = "initial_state"  # an argument of every form for a chunk that continues a state
FACTOR = "ssm_in_multiplier"  # of a mixer's input before its first projection (Falcon-H1)
CACHE_NAMES = ("cache", "cache_params", "past_key_values")  # of a mixer's argument: since 5.24, and before
FIRST_VERSION = "5.21"  # of transformers, with the cache's interface


Mixing = Callable[[torch.Tensor, RowCache], torch.Tensor]
# From the projections of rows by name, and their states by name, to the input of the last projection.
Step = Callable[[Mapping[str, torch.Tensor], Callable[[str], StateRows]], torch.Tensor]


@dataclass(frozen=True)
class MixerBinding:
    """Attached to a mixer.

    Attributes:
        index: Its index among the mixers.
        chunk: The most tokens of a prompt that it is given at once.
        states: The tensors of its state.
        projections: Its parts that are computed for all rows at once.
        context: Inputs of a step.
    """

    index: int
    chunk: int
    states: tuple[StateTensor, ...]
    projections: Projections
    context: ForwardContext

    def empty(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return a state of zeros."""
        return {each.name: torch.zeros(each.shape, dtype=each.dtype, device=device) for each in self.states}


def check_version(name: str) -> None:
    """Check that transformers keeps recurrent states behind the interface of `RowCache`.

    Raises:
        UnsupportedModel: It keeps them otherwise.
    """
    if not hasattr(transformers.Cache, "get_conv_state"):
        found = f"transformers {transformers.__version__} keeps it in another way"
        raise UnsupportedModel(
            name, f"its layers keep a recurrent state, and {found}: install {FIRST_VERSION} or a later one"
        )


def mixers_of(module: Any) -> list[Any]:
    """Return the modules of a transformers model that keep a recurrent state in a cache, in order."""
    return [part for part in module.modules() if _keeps_state(type(part))]


def _keeps_state(kind: Any) -> bool:
    if not kind.__module__.startswith("transformers.models."):
        return False
    if own_state_of(kind) is not None:
        return True
    code = _source(sys.modules.get(kind.__module__))
    return _calls_state(code) and _calls_state(_classes_in(code).get(kind.__qualname__, ""))


def _calls_state(source: str) -> bool:
    return any(call in source for call in CALLS)


@cache
def _source(module: Hashable) -> str:
    """Return the source of a module; "" where there is none."""
    try:
        return inspect.getsource(cast(Any, module))
    except (OSError, TypeError):
        return ""


@cache
def _classes_in(source: str) -> dict[str, str]:
    """Return the source of each class of a module by name. `inspect` would parse the module again for each."""
    lines = source.splitlines(keepends=True)
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {each.name: "".join(lines[each.lineno - 1 : each.end_lineno]) for each in classes}


class Recorder:
    """Runs mixers with an empty cache, and records the shapes of their states.

    Args:
        module: The transformers model.
    """

    def __init__(self, module: Any) -> None:
        self._mixers = mixers_of(module)
        self._found: dict[int, dict[str, torch.Tensor]] = {}
        self.projections: dict[int, Projections] = {}

    def __enter__(self) -> Self:
        for index, part in enumerate(self._mixers):
            part.forward = self._recording(index, part)
        return self

    def __exit__(self, *_: object) -> None:
        for part in self._mixers:
            part.__dict__.pop("forward", None)

    def _recording(self, index: int, part: Any) -> Any:
        mix = _mixing(part)

        def run(hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
            held, finder = RowCache(), ProjectionFinder(part, getattr(part, FACTOR, None))
            mixed = mix(hidden_states, held)
            self._found[index] = held.state
            self.projections[index] = finder.found(hidden_states, mixed)
            return _returned(part, mixed)

        return run

    def states(self, name: str) -> tuple[StateTensor, ...]:
        """Return the tensors of all mixers' states, in order.

        Raises:
            UnsupportedModel: A mixer did not run, or keeps no tensors of one sequence.
        """
        tensors = []
        for index in range(len(self._mixers)):
            if not self._found.get(index):
                raise UnsupportedModel(
                    name, f"its layer with a recurrent state of index {index} keeps none in its cache"
                )
            for key, state in sorted(self._found[index].items()):
                if state.dim() < 2 or state.shape[0] != 1 or not state.is_floating_point():
                    problem = f"a recurrent state of its layers is {list(state.shape)} {state.dtype}"
                    raise UnsupportedModel(name, f"{problem}: expected numbers [1, n, ...]")
                tensors.append(StateTensor(index, key, tuple(state.shape), state.dtype))
        return tuple(tensors)


def bind_mixers(module: Any, context: ForwardContext, states: tuple[StateTensor, ...], recorder: Recorder) -> int:
    """Let each mixer run row by row with the states in the pool.

    Outside a pass (`ForwardContext.batch` is None) a mixer runs as transformers wrote it, without a cache.

    Args:
        module: The transformers model.
        context: Inputs of a step, shared by all layers.
        states: The tensors of all mixers' states, as the recorder returned them.
        recorder: Has the mixers' projections.

    Returns:
        Tokens of a chunk of a prompt: chunks begin and end at multiples of it. 1 if there is no mixer.
    """
    mixers = mixers_of(module)
    for index, part in enumerate(mixers):
        own = tuple(each for each in states if each.layer == index)
        binding = MixerBinding(index, _chunk_of(part), own, recorder.projections[index], context)
        part.__dict__[MIXING] = binding
        part.forward = _bound(binding, part)
    return math.lcm(*(part.__dict__[MIXING].chunk for part in mixers))


class BoundMixer:
    """Runs a bound mixer within a described decoder; see `kernels.recurrent.Mixer`.

    Args:
        part: The module.
        as_part: Whether to return this rank's part of a sum over ranks.
    """

    def __init__(self, part: Any, as_part: bool = False) -> None:
        self._part, binding, self._as_part = part, part.__dict__[MIXING], as_part
        self._context: ForwardContext = binding.context
        self.step = _described_step(part)

    def runs_prompts(self, operations: StepOperations, dtype: torch.dtype) -> bool:
        """Implement `Mixer.runs_prompts`."""
        return isinstance(self.step, Described) and form_of_prompts(self.step, operations, dtype) is not None

    def __call__(
        self, operations: StepOperations, normed: torch.Tensor, batch: PagedBatch, pool: KvPool
    ) -> torch.Tensor:
        """Implement `Mixer`."""
        self._context.batch, self._context.pool, self._context.as_part = batch, pool, self._as_part
        step = None if self.step is None else partial(self.step.run, operations, operations)
        prompts = None if self.step is None else ChunkedPrompts(self.step, operations, batch)
        try:
            mixed = mixed_of(self._part(normed[None], step=step, prompts=prompts))
        finally:
            self._context.batch = self._context.pool = None
            self._context.as_part = False
        return mixed[0]


def _described_step(part: Any) -> MixerStep | None:
    """Return the step of a bound mixer; None: it is not described, or needs projections that were not found."""
    projections = part.__dict__[MIXING].projections
    step = step_of(part) if projections.output is not None else None
    names = {place.name for place in projections.inputs}
    return step if step is not None and names.issuperset(step.projections) else None


def described_steps(module: Any) -> dict[int, MixerStep]:
    """Return the steps of a model's bound mixers by their index, without those that are not described."""
    found = {index: _described_step(part) for index, part in enumerate(mixers_of(module))}
    return {index: step for index, step in found.items() if step is not None}


def _chunk_of(part: Any) -> int:
    kind: Any = type(part)
    if (own := own_state_of(kind)) is not None:
        return own.chunk or DEFAULT_CHUNK
    source = _source(kind)
    if RECURRENT in source and CONTINUES not in source:
        return 1
    chunk = getattr(part, "chunk_size", DEFAULT_CHUNK)
    return chunk if isinstance(chunk, int) and chunk > 0 else DEFAULT_CHUNK


def _mixing(part: Any) -> Mixing:
    """Return a function that runs a mixer over hidden states [1, tokens, hidden size] with a cache."""
    if (own := own_state_of(type(part))) is not None:
        return partial(own.mix, part, part.forward)
    forward, named = part.forward, inspect.signature(part.forward).parameters
    name = next((each for each in CACHE_NAMES if each in named), CACHE_NAMES[0])

    def mix(hidden: torch.Tensor, held: RowCache) -> torch.Tensor:
        mixed: torch.Tensor = forward(hidden, **{name: held})
        return mixed

    return mix


def _returned(part: Any, mixed: torch.Tensor) -> Any:
    """Return what a mixer's layer expects, from the mixer's result."""
    return mixed if own_state_of(type(part)) is None else (mixed, None)


def mixed_of(found: Any) -> torch.Tensor:
    """Return the result of a mixer, which may have returned other things behind it."""
    mixed: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return mixed


def _bound(binding: MixerBinding, part: Any) -> Any:
    forward, mix = part.forward, _mixing(part)

    def run(
        hidden_states: torch.Tensor,
        *given: Any,
        step: Step | None = None,
        prompts: ChunkedPrompts | None = None,
        **keywords: Any,
    ) -> Any:
        context = binding.context
        if step is None and binding.index in context.steps and context.operations is not None:
            step = partial(context.steps[binding.index].run, context.operations, context.operations)
            if prompts is None and context.batch is not None and context.steps[binding.index].selective is not None:
                prompts = ChunkedPrompts(context.steps[binding.index], context.operations, context.batch)
        if context.batch is not None:
            return _returned(part, _mixed(binding, mix, hidden_states, step, prompts))
        if context.single_tokens is not None:
            alone = partial(_mixed_behind_zeros, binding, mix)
            found = context.single_tokens.mixed(binding.index, alone, binding.projections, hidden_states)
            return _returned(part, found)
        return forward(hidden_states, *given, **keywords)

    return run


def _mixed(
    binding: MixerBinding, mix: Mixing, hidden: torch.Tensor, step: Step | None, prompts: ChunkedPrompts | None
) -> torch.Tensor:
    """Run a mixer over the rows of a step: one after the other, or together what `step` and `prompts` compute.

    Args:
        binding: The mixer's binding.
        mix: The mixer itself.
        hidden: [1, tokens, hidden size].
        step: Computes generated tokens; None: the mixer does.
        prompts: Computes prompts where the device has operations for them; None: the mixer does.

    Returns:
        [1, tokens, hidden size].
    """
    batch, pool, as_part = binding.context.batch, binding.context.pool, binding.context.as_part
    assert batch is not None and pool is not None, "a mixer outside LoadedModel.forward"
    assert batch.states is not None and pool.states is not None, "a step without the pages of its rows' states"
    cuts_blocks = pool.block_size % binding.chunk != 0  # otherwise no full block lies in an incomplete chunk
    if isinstance(batch, MixedBatch):
        assert step is not None and prompts is not None, "a graph of a mixer that runs row by row"
        return _mixed_in_graph(binding, hidden, step, prompts, batch, pool)
    parts: dict[int, list[torch.Tensor]] = {}
    together: torch.Tensor | None = None
    with binding.projections.over(hidden) as tokens:
        for wave in waves(batch, step is not None):
            if wave.copied is not None:
                pool.states.copy(binding.index, *(pages.long() for pages in wave.copied))
            if step is not None and wave.stepping is not None:
                projected = {name: wave.pick(each[0]) for name, each in tokens.projected.items()}
                stepped = step(projected, partial(pool.states.rows, binding.index, pages=wave.pages))[None]
                if batch.depth:
                    if together is None or wave.chosen is None:
                        together = stepped
                    else:
                        together = torch.where(wave.chosen.bool(), stepped, together)
                    continue
                if wave.tokens is None:
                    return tokens.result([stepped], as_part)
                parts |= {row: [each] for row, each in zip(wave.stepping, stepped.split(1, dim=1), strict=True)}
            chunked = None if prompts is None else prompts.operations_of(wave, hidden.dtype)
            if prompts is not None and chunked is not None:
                states = partial(pool.states.rows, binding.index, pages=prompts_of(batch, wave).pages)
                every = {name: each[0] for name, each in tokens.projected.items()}
                found = prompts.step.run(chunked, prompts.operations, every, states)[None]
                if len(wave.alone) == len(batch.counts):
                    return tokens.result([found], as_part)
                places = [slice(*batch.query_starts[row : row + 2].tolist()) for row in wave.alone]
                parts |= {row: [found[:, place]] for row, place in zip(wave.alone, places, strict=True)}
                continue
            for row in wave.alone:
                parts[row] = _mixed_alone(binding, mix, tokens, row, cuts_blocks)
        if together is not None:
            return tokens.result([together], as_part)
    return tokens.result([part for row in sorted(parts) for part in parts[row]], as_part)


def _mixed_in_graph(
    binding: MixerBinding, hidden: torch.Tensor, step: Step, prompts: ChunkedPrompts, batch: MixedBatch, pool: KvPool
) -> torch.Tensor:
    """Run a mixer as `_mixed` does over a static batch of prompt rows and decodes: every shape follows from its sizes.

    Raises:
        WorkerError: The device has no kernels for its prompts: the host would run them row by row.
    """
    assert pool.states is not None, "a model without recurrent states"
    (wave,) = waves(batch, True)
    chunked = prompts.operations_of(wave, hidden.dtype)
    if chunked is None:
        raise WorkerError("prompts of its recurrent layers run row by row")
    with binding.projections.over(hidden) as tokens:
        every = {name: each[0] for name, each in tokens.projected.items()}
        states = partial(pool.states.rows, binding.index, pages=prompts_of(batch, wave).pages)
        found = prompts.step.run(chunked, prompts.operations, every, states)
        if wave.stepping is not None:
            first = batch.size.prompt_tokens
            behind = partial(pool.states.rows, binding.index, pages=wave.pages)
            found[first:] = step({name: each[first:] for name, each in every.items()}, behind)
        return tokens.result([found[None]], binding.context.as_part)


def _mixed_alone(
    binding: MixerBinding, mix: Mixing, tokens: JoinedTokens, row: int, cuts_blocks: bool
) -> list[torch.Tensor]:
    """Run a mixer over one row, chunk by chunk; return the results of the chunks, [1, tokens, hidden size] each."""
    batch, pool = binding.context.batch, binding.context.pool
    assert batch is not None and batch.states is not None and pool is not None and pool.states is not None
    parts, pages, start = [], batch.states[row].tolist(), int(batch.starts[row])
    state = pool.states.load(binding.index, pages) if start else None
    first = int(batch.query_starts[row]) - start
    for begin, end in chunks(start, int(batch.lengths[row]), binding.chunk):
        held = RowCache(state)
        full = (begin // binding.chunk + 1) * binding.chunk
        if end < full and cuts_blocks and not batch.generated[row]:
            parts.append(_last_chunk(mix, tokens, (first + begin, first + end), full - begin, held))
        else:
            parts.append(mix(tokens.part(first + begin, first + end), held))
        # Behind every chunk, so that a state does not depend on the steps in which its tokens came.
        state = pool.states.rounded(binding.index, held.state)
    assert state is not None, "a row without tokens"
    pool.states.store(binding.index, pages, state)
    return parts


def _last_chunk(mix: Mixing, tokens: JoinedTokens, place: tuple[int, int], count: int, held: RowCache) -> torch.Tensor:
    """Run a mixer over an incomplete chunk of a prompt.

    Its tokens have the bits that they have in a whole chunk: later tokens change no earlier one, but the length of a
    tensor changes its rounding.

    Args:
        mix: The mixer.
        tokens: The tokens of the step.
        place: The chunk's tokens in the step, [first, end).
        count: Tokens of the whole chunk.
        held: The state, which is advanced by the chunk's own tokens alone.

    Returns:
        [1, end - first, hidden size].
    """
    first, end = place
    mixed = mix(tokens.padded(first, end, count), held.copied())[:, : end - first]
    mix(tokens.part(first, end), held)
    return mixed


def _mixed_behind_zeros(binding: MixerBinding, mix: Mixing, token: torch.Tensor) -> torch.Tensor:
    return mix(token, RowCache(binding.empty(token.device)))


def chunks(start: int, end: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield [begin, end) of the parts of the positions [start, end), cut at absolute multiples of `chunk`."""
    while start < end:
        stop = min(end, (start // chunk + 1) * chunk)
        yield start, stop
        start = stop
