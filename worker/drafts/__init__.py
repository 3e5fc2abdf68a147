"""Drafters: they propose the tokens that may follow, which the model then verifies in one step.

A draft never changes an answer. The model computes each drafted token as a decode of its own, and a draft counts only
if it is the token that is sampled without drafts (`kvforge.worker.sampling.ahead`).

| module | what it does |
|---|---|
| `drafter` | the interface, and what a drafter costs |
| `history` | the last tokens of a request, with an index of their runs |
| `recent` | the histories of recent requests of the same tenant |
| `lookup` | proposes what followed the last tokens earlier in the same request or in recent ones |
| `model` | proposes by a draft model, where lookup finds no long run |
"""
