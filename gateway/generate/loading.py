"""Loads the prompts of a served model: its tokenizer, text helpers and the needs of its chat template."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from kvforge.gateway.chat.prompt_cleaner import PromptCleaner
from kvforge.gateway.chat.prompts import Prompts
from kvforge.gateway.config import Settings
from kvforge.gateway.parse import Format, choose
from kvforge.gateway.text.jobs import TextLimits
from kvforge.gateway.text.pool import TextPool
from kvforge.protocol.configuration import expand
from kvforge.protocol.errors import InvalidConfiguration, InvalidRequest, ModelNotFound, UnsupportedModel
from kvforge.protocol.messages import ModelInfo
from kvforge.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


async def prompts_of(info: ModelInfo, settings: Settings) -> tuple[Prompts, Format]:
    """Load the tokenizer and the output format of a model.

    Args:
        info: The model.
        settings: The gateway's settings.

    Returns:
        Its prompts, and the format of its reasoning and tool calls. Without a tokenizer, only token ids are accepted.

    Raises:
        KvforgeError: The tokenizer that `settings` names, or its chat template, cannot be read.
    """
    hygiene = PromptCleaner(settings.strip, settings.move)
    source = settings.tokenizer or info.source
    template_file = str(expand(settings.chat_template).absolute()) if settings.chat_template else ""
    limits = TextLimits(
        text_bytes_max=settings.text_bytes_max,
        context_tokens_max=info.context_tokens_max,
        template_s=settings.template_s,
        text_s=settings.text_s,
        memory_bytes_max=settings.text_memory_bytes_max,
    )
    make = partial(TextPool, limits=limits, processes=settings.text_processes, waiting_max=settings.text_waiting_max)
    pool = make(source, template_file=template_file)
    try:
        # A helper loads the tokenizer and sends the table that answers need, so the event loop stays responsive.
        try:
            table = await pool.start()
            tokens = _loaded_here(source, template_file, table) if isinstance(table, str) else table
        except (ModelNotFound, UnsupportedModel, InvalidRequest) as error:
            if settings.tokenizer:
                raise
            await pool.close()
            log.warning("no tokenizer: %s; requests must send token ids", error.message)
            return Prompts(None, make(None), hygiene), choose("")
        format_ = choose(tokens.chat_template, settings.tool_format)
        prompts = Prompts(tokens, pool, hygiene)
        await prompts.look(format_.write_calls)
    except BaseException:
        await pool.close()
        raise
    for problem in filter(None, dict.fromkeys((prompts.needs.problem, prompts.needs.tools_problem))):
        log.warning("%s", problem)
    return prompts, format_


def _loaded_here(source: str, template_file: str, reason: str) -> Tokenizer:
    """Load a tokenizer that has no table. This blocks the event loop, since no process runs a second thread."""
    log.warning("the gateway does not respond while it loads the tokenizer itself: %s", reason)
    tokenizer = Tokenizer.load(source)
    if template_file:
        try:
            tokenizer.use_chat_template(Path(template_file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfiguration("chat_template", f"cannot read {template_file}: {error}") from None
    return tokenizer
