"""Validation: requests that could never be served are refused on arrival, naming the field."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvforge.protocol import salts
from kvforge.protocol.errors import Conflict, InvalidRequest, ProtocolError, QuotaExceeded
from kvforge.protocol.messages import (
    GRAMMAR_BYTES_MAX,
    LOGIT_BIAS_LIMIT,
    LOGIT_BIAS_MAX,
    MODEL_DEFAULTS,
    SAMPLING_RANGES,
    TOP_LOGPROBS_MAX,
    ModelInfo,
    SamplingParams,
    Submit,
    WorkerReady,
)

from .. import sizes
from ..cache.kv_cache_manager import KVCacheManager
from ..cache.windows import ring_blocks
from ..limits import Bounds, Limits, microseconds
from ..requests import prompt_logprobs
from ..scheduling.rows import EOS_TOKENS_MAX

TEMPERATURE_MAX = 100.0
PINS_MAX = 4  # as Anthropic's API has breakpoints
IDLE_TTL_MS_MAX = 30 * 24 * 3600 * 1000
SEED_MAX = (1 << 64) - 1
SALT_LENGTH_MAX = 256
PRIORITY_MAX = 100
VOCABULARY_UNKNOWN = 1 << 31
HOST_BLOCKS_MAX = DISK_BLOCKS_MAX = 1 << 20
HOST_IDENTITY_MAX = 64
DRAFT_STATES_MAX = 1 << 16
DEVICE_PURPOSES_MAX = 16
DEVICE_PURPOSE_LENGTH_MAX = 32
KERNELS_MAX, KERNEL_LENGTH_MAX = 16, 1000
DEVICE_BYTES_MAX = (1 << 63) - 1
PROMPT_LOGPROBS_BYTES_MAX = 16 << 20  # of one request


def submit(
    message: Submit,
    prompt: npt.NDArray[np.int32],
    tenant: str,
    cache: KVCacheManager,
) -> None:
    """Validate a request.

    Args:
        message: The command.
        prompt: All tokens that the request starts from, including those of its sequence, [n] int32.
        tenant: The tenant's name.
        cache: The cache.

    Raises:
        InvalidRequest: A field is invalid.
        QuotaExceeded: The request could never fit under its tenant's ceiling.
    """
    if prompt.size == 0:
        raise InvalidRequest("prompt", "is empty: give at least one token id")
    scores = message.sampling.prompt_logprobs is not None
    if message.max_tokens < (0 if scores else 1):
        least = "0" if scores else "1 (0 only with sampling.prompt_logprobs)"
        raise InvalidRequest("max_tokens", f"must be at least {least}, not {message.max_tokens}")
    limits = cache.limits
    if not 1 <= message.count <= limits.bounds.samples_max:
        raise InvalidRequest("count", f"must be 1 to {limits.bounds.samples_max} answers, not {message.count}")
    if message.count > 1 and message.sequence_id:
        raise InvalidRequest("count", "only one request can continue a sequence: fork it, and continue each fork")
    if message.count > 1 and not message.max_tokens:
        raise InvalidRequest("count", f"must be 1 where max_tokens is 0, not {message.count}")
    if scores and message.sequence_id:
        problem = "cannot be computed for a sequence that is kept: submit its tokens as a prompt of their own"
        raise InvalidRequest("sampling.prompt_logprobs", problem)
    if not -PRIORITY_MAX <= message.priority <= PRIORITY_MAX:
        raise InvalidRequest("priority", f"must be -{PRIORITY_MAX} to {PRIORITY_MAX}, not {message.priority}")
    for field in ("deadline_ms", "first_token_ms"):
        most = microseconds(limits.bounds.deadline_max_s) // 1000
        if not 0 <= getattr(message, field) <= most:
            raise InvalidRequest(field, f"must be 0 (no limit of its own) to {most} ms, not {getattr(message, field)}")
    if not 0 <= message.keep_ms <= IDLE_TTL_MS_MAX:
        raise InvalidRequest("keep_ms", f"must be 0 (do not keep it) to {IDLE_TTL_MS_MAX} ms, not {message.keep_ms}")
    for field in ("continues", "keep_ms"):
        if message.sequence_id and getattr(message, field):
            problem = "cannot be combined with sequence_id: a request on a sequence continues and keeps that one"
            raise InvalidRequest(field, problem)
    if message.pins:
        _check_pins(message)
    if message.ahead:
        _check_ahead(message, cache)
    if not set(message.model_defaults) <= set(MODEL_DEFAULTS):
        raise InvalidRequest("model_defaults", f"a model can only have defaults for {', '.join(MODEL_DEFAULTS)}")
    sampling(message.sampling, limits.bounds, cache.model)
    if message.sampling.prompt_logprobs is not None:
        _check_scores(prompt.size, message.sampling.prompt_logprobs)
    fits(prompt, message.max_tokens, tenant, cache)


def _check_pins(message: Submit) -> None:
    if len(message.pins) > PINS_MAX:
        raise InvalidRequest("pins", f"must be at most {PINS_MAX}, not {len(message.pins)}")
    if message.sequence_id:
        raise InvalidRequest("pins", "cannot be combined with sequence_id: set a time to live of that sequence")
    for tokens, idle_ms in message.pins:
        if tokens < 1 or not 1 <= idle_ms <= IDLE_TTL_MS_MAX:
            problem = f"must be at least 1 token for 1 to {IDLE_TTL_MS_MAX} ms, not {tokens} for {idle_ms} ms"
            raise InvalidRequest("pins", problem)


def _check_ahead(message: Submit, cache: KVCacheManager) -> None:
    if not cache.indexing.kinds:
        raise InvalidRequest("ahead", "is of no use: the workers compute generated tokens as those of a prompt")
    if message.sequence_id or message.count != 1 or message.max_tokens != 1:
        raise InvalidRequest("ahead", "computes one prompt: it takes no sequence_id, a count of 1 and max_tokens of 1")


def _check_scores(prompt_tokens: int, width: int) -> None:
    size = prompt_logprobs.bytes_of(prompt_tokens, width)
    if size > PROMPT_LOGPROBS_BYTES_MAX:
        problem = f"{width} for each of {prompt_tokens} tokens take {size} bytes; at most {PROMPT_LOGPROBS_BYTES_MAX}"
        raise InvalidRequest("sampling.prompt_logprobs", f"{problem}: ask for fewer, or shorten the prompt")


def tenant_salt(tenant: str, salt: str) -> str:
    """Return the salt of a client that sees one tenant, which clients of other tenants cannot share.

    Raises:
        InvalidRequest: The salt is too long.
    """
    _check_salt(salt)
    return salts.tenant_salt(tenant, salt)


def salt_text(tenant: str, salt: str) -> str:
    """Return the text that seeds a prefix chain: an explicit salt, shared by all that name it, else the tenant.

    Raises:
        InvalidRequest: The salt is too long.
    """
    _check_salt(salt.rpartition(salts.OWNER_END)[2])
    return f"salt:{salt}" if salt else f"tenant:{tenant}"


def _check_salt(salt: str) -> None:
    if len(salt) > SALT_LENGTH_MAX:
        raise InvalidRequest("salt", f"at most {SALT_LENGTH_MAX} characters")


def tokens(field: str, values: npt.NDArray[np.int32], vocabulary: int) -> None:
    """Validate token ids.

    Raises:
        InvalidRequest: An id is outside the vocabulary; the error names `field`.
    """
    # Viewed as unsigned, negative ids are large.
    if np.count_nonzero(values.view(np.uint32) >= vocabulary):
        lowest, highest = int(values.min()), int(values.max())
        wrong = lowest if lowest < 0 else highest
        raise InvalidRequest(field, f"token id {wrong} is outside the vocabulary of {vocabulary}")


def sampling(values: SamplingParams, bounds: Bounds, model: ModelInfo | None) -> None:
    """Validate sampling parameters.

    Raises:
        InvalidRequest: A parameter is invalid; the error names it.
    """
    temperature = values.temperature
    if not math.isfinite(temperature) or not 0.0 <= temperature <= TEMPERATURE_MAX:
        raise InvalidRequest("sampling.temperature", f"must be 0 to {TEMPERATURE_MAX:g}, not {temperature}")
    if values.seed is not None and not 0 <= values.seed <= SEED_MAX:
        raise InvalidRequest("sampling.seed", "must be an unsigned 64-bit integer")
    if len(values.stop_tokens) > bounds.stop_tokens_max:
        raise InvalidRequest("sampling.stop_tokens", f"at most {bounds.stop_tokens_max} stop tokens")
    vocabulary = model.vocab_size if model else VOCABULARY_UNKNOWN
    for token in values.stop_tokens:
        if not 0 <= token < vocabulary:
            raise InvalidRequest("sampling.stop_tokens", f"token id {token} is outside the vocabulary of {vocabulary}")
    for name, (low, high) in SAMPLING_RANGES.items():
        if not low <= getattr(values, name) <= high:
            raise InvalidRequest(f"sampling.{name}", f"must be {low:g} to {high:g}, not {getattr(values, name)}")
    wanted = values.prompt_logprobs
    if wanted is not None and not 0 <= wanted <= TOP_LOGPROBS_MAX:
        raise InvalidRequest("sampling.prompt_logprobs", f"must be 0 to {TOP_LOGPROBS_MAX}, not {wanted}")
    _logit_bias(values.logit_bias, vocabulary)
    if values.grammar is not None:
        size = len(values.grammar.text.encode())
        if size > GRAMMAR_BYTES_MAX:
            raise InvalidRequest("sampling.grammar", f"has {size} bytes; at most {GRAMMAR_BYTES_MAX}")
        if values.ignore_eos:
            raise InvalidRequest(
                "sampling.ignore_eos", "not allowed with a grammar, which ends at an end-of-sequence token"
            )


def _logit_bias(pairs: tuple[tuple[int, float], ...], vocabulary: int) -> None:
    if len(pairs) > LOGIT_BIAS_MAX:
        raise InvalidRequest("sampling.logit_bias", f"at most {LOGIT_BIAS_MAX} entries")
    seen = set()
    for token, value in pairs:
        if not 0 <= token < vocabulary:
            raise InvalidRequest("sampling.logit_bias", f"token id {token} is outside the vocabulary of {vocabulary}")
        if token in seen:
            raise InvalidRequest("sampling.logit_bias", f"names token id {token} twice")
        if not (-LOGIT_BIAS_LIMIT <= value <= LOGIT_BIAS_LIMIT or value == -math.inf):
            raise InvalidRequest(
                "sampling.logit_bias", f"values are -{LOGIT_BIAS_LIMIT:g} to {LOGIT_BIAS_LIMIT:g} or -inf"
            )
        seen.add(token)


def fits(
    prompt: npt.NDArray[np.int32],
    max_tokens: int,
    tenant: str,
    cache: KVCacheManager,
) -> None:
    """Check that a request can ever fit into a pool.

    Raises:
        InvalidRequest: The context or every pool is too small.
        QuotaExceeded: The tenant's ceiling is too low.
    """
    total = prompt.size + max_tokens
    model, context = cache.model, cache.limits.context_tokens_max
    if model is not None:
        context = min(context, model.context_tokens_max)
    numbers = {"prompt_tokens": prompt.size, "max_tokens": max_tokens, "context_tokens": context}
    if prompt.size + min(1, max_tokens) > context:
        problem = f"has {prompt.size} tokens; the context holds {context}, the answer included"
        raise InvalidRequest("prompt", problem, **numbers)
    if total > context:
        problem = f"{prompt.size} prompt tokens + {max_tokens} exceed the context of {context}"
        raise InvalidRequest("max_tokens", problem, **numbers)
    tokens("prompt", prompt, cache.vocab_size)
    blocks = cache.sequences.blocks_for(total)
    needed = blocks + cache.state_blocks + cache.windows.most(cache, blocks)
    largest = cache.largest_pool
    reserved = cache.tenants.reserved_for_others(tenant)
    if largest and needed > largest - reserved:
        held_back = f", {reserved} reserved for other tenants" if reserved else ""
        problem = f"{total} tokens need {needed} blocks; the largest pool has {largest}{held_back}"
        room = cache.windows.longest(cache, largest - reserved - cache.state_blocks) * cache.sequences.block_size
        raise InvalidRequest("max_tokens", problem, **{**numbers, "context_tokens": room})
    ceiling = int(cache.tenants.ceiling[cache.tenants.peek(tenant)])
    if needed > ceiling:
        raise QuotaExceeded(tenant, needed, ceiling)


def worker_ready(name: str, message: WorkerReady, limits: Limits) -> None:
    """Validate a worker's announcement.

    Raises:
        ProtocolError: A value is impossible.
        Conflict: The worker lacks a feature that the configuration needs.
    """
    bounds = limits.bounds
    if limits.cache.zero_on_tenant_change and not message.zeroes:
        raise Conflict(f"worker {name!r} cannot zero blocks, as cache.zero_on_tenant_change requires: upgrade it")
    if message.blocks < 1 or message.bytes_per_block < 1:
        raise ProtocolError(f"worker {name}: blocks and bytes_per_block must be at least 1")
    if message.model.vocab_size < 1 or message.model.context_tokens_max < 1:
        raise ProtocolError(f"worker {name}: vocab_size and context_tokens_max must be at least 1")
    if len(message.model.eos_tokens) > EOS_TOKENS_MAX:
        raise ProtocolError(f"worker {name}: at most {EOS_TOKENS_MAX} end tokens")
    if message.blocks > bounds.blocks_max:
        raise ProtocolError(f"worker {name}: {message.blocks} blocks exceed blocks_max = {bounds.blocks_max}")
    if not 0 <= message.drafts <= limits.schedule.drafts_max:
        most = limits.schedule.drafts_max
        raise ProtocolError(f"worker {name}: drafts must be 0 to schedule.drafts_max = {most}, not {message.drafts}")
    if not 0 <= message.model_drafts <= message.drafts:
        raise ProtocolError(
            f"worker {name}: model_drafts must be 0 to drafts = {message.drafts}, not {message.model_drafts}"
        )
    if not 0 <= message.draft_states <= DRAFT_STATES_MAX:
        raise ProtocolError(f"worker {name}: draft_states must be 0 to {DRAFT_STATES_MAX}, not {message.draft_states}")
    _states(name, message, limits)
    _windows(name, message, limits)
    _host_tier(name, message)
    try:
        sampling(message.model.sampling, bounds, message.model)
    except InvalidRequest as error:
        raise ProtocolError(f"worker {name}: {error}") from None
    _device_bytes(name, message.device_bytes)
    _kernels(name, message.kernels)


def _host_tier(name: str, message: WorkerReady) -> None:
    """Validate what a worker announces about its host file."""
    if not 0 <= message.host_blocks <= HOST_BLOCKS_MAX:
        raise ProtocolError(f"worker {name}: host_blocks {message.host_blocks}: expected 0 to {HOST_BLOCKS_MAX}")
    if not 0 <= message.disk_blocks <= DISK_BLOCKS_MAX:
        raise ProtocolError(f"worker {name}: disk_blocks {message.disk_blocks}: expected 0 to {DISK_BLOCKS_MAX}")
    if not message.host_blocks:
        if message.disk_blocks:
            raise ProtocolError(f"worker {name}: disk_blocks without host_blocks is not supported")
        return
    if not 0 < len(message.host_identity) <= HOST_IDENTITY_MAX:
        size = len(message.host_identity)
        raise ProtocolError(f"worker {name}: host_identity has {size} characters: expected 1 to {HOST_IDENTITY_MAX}")


def _states(name: str, message: WorkerReady, limits: Limits) -> None:
    """Validate what a worker announces about its model's recurrent state."""
    if message.state_blocks < 0 or message.prompt_chunk < 1:
        problem = f"state_blocks {message.state_blocks}, prompt_chunk {message.prompt_chunk}"
        raise ProtocolError(f"worker {name}: {problem}: expected at least 0 and 1")
    if not message.state_blocks:
        return
    if not message.wants_kinds:
        raise ProtocolError(f"worker {name}: state_blocks needs wants_kinds")
    if message.state_blocks > limits.bounds.state_blocks_max:
        raise Conflict(
            f"worker {name!r}: the recurrent state of a sequence takes {message.state_blocks} blocks, more than "
            f"limits.state_blocks_max = {limits.bounds.state_blocks_max}: raise it, or cache.block_size"
        )
    if message.state_blocks > (most := sizes.state_blocks_most(limits.bounds.sequences_max)):
        raise Conflict(
            f"worker {name!r}: the recurrent state of a sequence takes {message.state_blocks} blocks; with "
            f"limits.sequences_max = {limits.bounds.sequences_max}, steps can copy states of at most {most}: "
            "lower it, or raise cache.block_size"
        )
    if message.prompt_chunk > limits.schedule.step_tokens_max:
        raise Conflict(
            f"worker {name!r} computes prompts in chunks of {message.prompt_chunk} tokens, more than "
            f"schedule.step_tokens_max = {limits.schedule.step_tokens_max}: raise it"
        )
    if message.blocks <= message.state_blocks:
        raise Conflict(
            f"worker {name!r} has {message.blocks} blocks, of which the recurrent state of one sequence takes "
            f"{message.state_blocks}: give its pool more memory"
        )


def _windows(name: str, message: WorkerReady, limits: Limits) -> None:
    """Validate what a worker announces about its layers with a sliding window."""
    numbers = (message.window, message.window_pages, message.window_blocks)
    words = f"window {numbers[0]}, window_pages {numbers[1]}, window_blocks {numbers[2]}"
    if min(numbers) < 0 or 0 < numbers.count(0) < len(numbers):
        raise ProtocolError(f"worker {name}: {words}: expected all above 0, or all 0")
    if not message.window_pages:
        return
    bounds, size = limits.bounds, limits.cache.block_size
    least = ring_blocks(message.window, limits.schedule.window_ahead, size, bounds.blocks_per_sequence_max)
    if message.window_blocks < least:
        raise ProtocolError(f"worker {name}: {words}: the ring must name at least {least} blocks")
    ring = message.window_blocks * message.window_pages
    if message.state_blocks + ring > bounds.state_blocks_max:
        raise Conflict(
            f"worker {name!r}: the table of a sequence's windows and state names {message.state_blocks + ring} blocks, "
            f"more than limits.state_blocks_max = {bounds.state_blocks_max}: raise it, or cache.block_size"
        )
    each = message.state_blocks + message.window_pages + 1
    if each > (most := sizes.state_blocks_most(bounds.sequences_max)):
        raise Conflict(
            f"worker {name!r}: a sequence may need copies of {each} blocks in a step; with limits.sequences_max = "
            f"{bounds.sequences_max}, steps can carry {most} for each: lower it"
        )
    if message.blocks <= message.state_blocks + message.window_pages:
        raise Conflict(
            f"worker {name!r} has {message.blocks} blocks, fewer than the shortest sequence needs: "
            "give its pool more memory"
        )


def _kernels(name: str, kernels: dict[str, str]) -> None:
    if len(kernels) > KERNELS_MAX:
        raise ProtocolError(f"worker {name}: kernels: at most {KERNELS_MAX}")
    if not all(0 < len(word) <= KERNEL_LENGTH_MAX and word.isprintable() for each in kernels.items() for word in each):
        raise ProtocolError(f"worker {name}: kernels: 1 to {KERNEL_LENGTH_MAX} printable characters each")


def _device_bytes(name: str, device_bytes: dict[str, int]) -> None:
    if len(device_bytes) > DEVICE_PURPOSES_MAX:
        raise ProtocolError(f"worker {name}: device_bytes: at most {DEVICE_PURPOSES_MAX} purposes")
    for purpose, size in device_bytes.items():
        if not 0 < len(purpose) <= DEVICE_PURPOSE_LENGTH_MAX or not purpose.isprintable():
            raise ProtocolError(
                f"worker {name}: device_bytes: a purpose has 1 to {DEVICE_PURPOSE_LENGTH_MAX} printable characters"
            )
        if not 0 <= size <= DEVICE_BYTES_MAX:
            raise ProtocolError(f"worker {name}: device_bytes.{purpose}: must be 0 to {DEVICE_BYTES_MAX}, not {size}")
