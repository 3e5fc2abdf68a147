"""Sampling: from logits to tokens, with the sampling parameters of each slot.

sampler.py      the sampling state of every slot, and sampling in plain torch
kernels.py      kernels for rows that sample from the whole vocabulary, and feeding tokens back
grammar.py      token masks of rows with a grammar; grammar_tokens.py: the vocabulary for it
ahead.py        rows that sample behind drafts, and which of them count
draws.py        uniform numbers by (seed, position)
filters.py      top_k, top_p and min_p; penalties.py: penalties and logit biases
selftest.py     compares the kernels with plain torch, at a worker's start

Law: a draw depends only on the row's own logits, seed, position and sampling parameters, never on the batch. Code
outside uses `sampler.SamplingState`, which alone launches the kernels.
"""
