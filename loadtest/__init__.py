"""The load harness: drives kvforge, or any OpenAI-compatible server, and reports what users would have measured.

    kvforge loadtest --trace conversation --rate-scale 0.5 --duration 60 --out report/

Latency counts from the intended arrival of a request, not from when it was sent. A stalled server is therefore charged
for every request that would have arrived meanwhile (no coordinated omission). The driver is measured too: before the
run against a null server, and throughout the run. A result that the driver has distorted is marked invalid. The harness
talks to kvforge through the public client library.
"""
