"""A model's vocabulary as llguidance wants it: made once in a process, from the files that the model came from."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from kvforge.text.grammar_helper import GrammarHelper, TrialLimits
from kvforge.text.grammar_trials import GrammarTrials
from kvforge.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = logging.getLogger("worker")


@dataclass(frozen=True)
class GrammarTokens:
    """tokens: None where there is a problem. problem: why no grammar can be served. trials: tries grammars in another
    process before they are compiled in this one; None: they are not tried."""

    tokens: LLTokenizer | None
    problem: str = ""
    trials: GrammarTrials | None = None


@lru_cache(maxsize=1)
def grammar_tokens(
    source: str, vocab_size: int, eos_tokens: tuple[int, ...], limits: TrialLimits | None = None
) -> GrammarTokens:
    """What grammars need of a model: the bytes of its tokens, and which end an answer. Takes about a second.

    source: a path or a name, as ModelInfo has it. vocab_size: of the model; what it has beyond the tokenizer's is never
    allowed. limits: of each grammar's trial.
    """
    started = time.monotonic()
    if not eos_tokens:
        return GrammarTokens(None, "the model has no end-of-sequence token, by which an answer could end")
    try:
        from llguidance import LLTokenizer

        library = Tokenizer.load(source).as_json()
        made = LLTokenizer(library, n_vocab=vocab_size, eos_token=list(eos_tokens))
    except ImportError as error:
        return GrammarTokens(None, f"the worker has no llguidance ({error})")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - of the tokenizer's files; a panic of Rust is no Exception
        return GrammarTokens(None, f"the model has no tokenizer for it ({error})")
    log.debug("the tokenizer for grammars took %.1f s", time.monotonic() - started)
    return GrammarTokens(made, trials=GrammarTrials(GrammarHelper(library, vocab_size, eos_tokens, limits)))
