"""A model's vocabulary for llguidance, made once per process from the model's files."""

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
    """The vocabulary and the trial process of a model.

    Attributes:
        tokens: None if there is a problem.
        problem: Why grammars cannot be served.
        trials: Tries grammars in another process before they are compiled in this one; None: no trials.
    """

    tokens: LLTokenizer | None
    problem: str = ""
    trials: GrammarTrials | None = None


@lru_cache(maxsize=1)
def grammar_tokens(
    source: str, vocab_size: int, eos_tokens: tuple[int, ...], limits: TrialLimits | None = None
) -> GrammarTokens:
    """Load the bytes of a model's tokens, and the tokens that end an answer. Takes about a second.

    Args:
        source: Path or name of the model, as in ModelInfo.
        vocab_size: Size of the model's vocabulary. Ids beyond the tokenizer's are never allowed.
        eos_tokens: Tokens that end an answer.
        limits: Limits of each grammar's trial.

    Returns:
        The vocabulary, or the reason why there is none.
    """
    started = time.monotonic()
    if not eos_tokens:
        return GrammarTokens(None, "the model has no end-of-sequence token")
    try:
        from llguidance import LLTokenizer

        library = Tokenizer.load(source).as_json()
        made = LLTokenizer(library, n_vocab=vocab_size, eos_token=list(eos_tokens))
    except ImportError as error:
        return GrammarTokens(None, f"llguidance is not installed ({error})")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - damaged files; a Rust panic is no Exception
        return GrammarTokens(None, f"the model's tokenizer cannot be used ({error})")
    log.debug("loaded the tokenizer for grammars in %.1f s", time.monotonic() - started)
    return GrammarTokens(made, trials=GrammarTrials(GrammarHelper(library, vocab_size, eos_tokens, limits)))
