"""From logits to tokens: what each slot asked for, and how a token is chosen.

sampler.py      the state of every slot, and sampling in plain torch
kernels.py      the same by kernels for rows whose whole vocabulary stays in play, and feeding tokens back
host.py         by the CPU's kernels (host_kernels.py): such rows, and the draw of every other one
grammar.py      which tokens a row may choose where its request has a grammar; grammar_tokens.py: the vocabulary for it
draws.py        uniform numbers by (seed, position)
filters.py      which tokens stay in play; penalties.py: what shifts logits
selftest.py     the kernels against plain torch, at a worker's start

Law: what is drawn depends on the row's own logits, seed, position and sampling alone, never on the batch. Outside,
`sampler.SamplingState` is the face; the kernels are launched by it alone.
"""
