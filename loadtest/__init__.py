"""The load harness: a load at kvforge, or at any OpenAI-compatible server, and what its users would have measured.

    kvforge loadtest --trace conversation --rate-scale 0.5 --duration 60 --out report/

A request's latency counts from when it was meant to arrive, not from when it was sent: a server that stalls is charged
for everybody who would have come meanwhile. The driver is measured first, against a server that does nothing, and all
the time: a result that it has spoilt says so. It knows kvforge only as any client does.
"""
