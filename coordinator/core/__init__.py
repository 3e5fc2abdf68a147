"""The pure heart: an event in, effects out. No I/O, no clock, no randomness.

Rooms, each below those before it: machine; reporting, workers; commands; scheduling; requests; cache. A room imports
only from those below it, and from the files beside this one. docs/step.md follows one decode step through them.

Every event of a life, the first one (Boot) included, is a plain value: tools/simulation/replay.py gives those of one
process to another, which must come to the same state.
"""
