"""Chat templates and tokenizers in helper processes, so that neither can stall the gateway.

Invariant: the event loop never renders or tokenises. A helper process is limited in time and memory; one that exceeds a
limit fails only its request and is replaced.

Public interface: `pool.TextPool`, `inline.InlineText` (the same calls without processes) and `jobs.TextLimits`. The
helper is `python -m kvforge.gateway.text`.
"""
