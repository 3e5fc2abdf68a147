"""A step's way through the worker: the loop and its connection, checks, the batch, graphs, and what came of it.

loop.py         the only loop: messages and shared memory in, steps to the runner, results out; patience.py: its sleep
link.py         the connection to the coordinator
engine.py       what is made once: model, pool, runner; memory.py: how large the pool may be, and what memory is for
checks.py, starts.py   everything that is wrong with a step is found before any of it is carried out
runner.py       a step becomes tensors, a forward pass and sampled rows, queued on the device without waiting
shaping.py      rows whose next token a grammar restricts: their choice waits for their masks
graphs.py       decode steps from captured graphs
pending.py      a step under way, and its outcome; meter.py: what steps cost

Law: a step is queued and never waited for; only `Runner.finish` waits. A row's fault is that row's alone. From
outside, `loop.Worker` is started by `worker.__main__`; benchmarks and tests drive `engine.Engine` and `runner.Runner`.
"""
