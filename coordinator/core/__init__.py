"""The coordinator's state machine: an event in, effects out. No I/O, no clock, no randomness.

Layers, top to bottom: machine; reporting, workers; commands; scheduling; requests; cache. A package imports only from
the layers below it and from the modules next to this file. docs/step.md follows one decode step through them.

Every event of a boot, from `Boot` on, is a plain value. tools/simulation/replay.py replays the events of one process
in another, which must reach the same state.
"""
