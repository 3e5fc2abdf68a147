"""What transformers generates, to compare with answers of the service."""

from __future__ import annotations

import torch
import transformers

Answers = list[tuple[int, float]]


@torch.inference_mode()
def say(model: transformers.PreTrainedModel, prompts: list[list[int]], count: int) -> list[Answers]:
    """Return what transformers generates without a cache: tokens and their log-probabilities.

    Args:
        model: The model, in float32.
        prompts: Prompts of one length, which are computed together.
        count: The length of each answer.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them would spin beside other processes
    try:
        tokens, found = torch.tensor(prompts), [Answers() for _ in prompts]
        for _ in range(count):
            logprobs = torch.log_softmax(model(input_ids=tokens, use_cache=False).logits[:, -1].float(), -1)
            best = logprobs.max(-1)
            tokens = torch.cat((tokens, best.indices[:, None]), 1)
            for answer, token, logprob in zip(found, best.indices.tolist(), best.values.tolist(), strict=True):
                answer.append((token, logprob))
        return found
    finally:
        torch.set_num_threads(threads)


def tokens_of(answers: list[Answers]) -> list[tuple[int, ...]]:
    """Return the tokens alone."""
    return [tuple(token for token, _ in answer) for answer in answers]
