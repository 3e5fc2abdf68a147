"""The heart: an event in, effects out, same input same output. No I/O, no clock, no randomness, no threads."""
