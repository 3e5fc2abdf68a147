"""The load harness: open-loop arrivals at a running kvforge, and what its users would have measured.

    python -m loadtest --rate 20 --requests 500 --input 128 --output 64

A request's latency counts from when it was meant to arrive, not from when it was sent: a server that stalls is charged
for everybody who would have come meanwhile. One process, one event loop, no threads; it knows kvforge only as any
client does.
"""
