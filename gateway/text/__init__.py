"""Chat templates and tokenizers in processes of their own, so that neither can stop the gateway.

Law: the event loop never renders or tokenises. A helper process is bounded in time and memory; one that exceeds a bound
costs its request alone and is replaced.

From outside: `pool.TextPool`, `inline.InlineText` (the same calls without processes) and `jobs.TextLimits`. The helper
is `python -m kvforge.gateway.text`.
"""
