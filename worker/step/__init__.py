"""Step execution: the worker's loop and connection, input checks, the model runner, decode graphs, and results.

loop.py         the only loop: messages and shared memory in, steps to the runner, results out
poll_backoff.py   how long the loop sleeps while a step runs
connection.py   the connection to the coordinator
engine.py       objects made once: model, pool, runner; memory.py: the pool's size and the memory accounts
checks.py, starts.py   validation of a whole step before it runs
draft_checks.py validation of rows with drafts
runner.py       turns a step into tensors, a forward pass and sampled rows, queued on the device without waiting
zeroing.py      zeroes blocks of other tenants; host_copies.py: the copies of a step from and to the host
row_starter.py  assigns slots to new requests; slot_records.py: the state of slots that the host needs
row_launcher.py queues rows, from a captured graph or as passes
forward_passes.py passes outside of graphs, from host arrays to logits and scored prompt tokens
row_sampler.py  queues the sampling of rows; rows with drafts advance by the tokens that count
step_drafts.py  proposes drafts behind steps, and accepts the drafts in them
draft_states.py pages of the recurrent states behind drafted tokens
step_results.py reads what a finished step has sampled and scored
step_failures.py errors that end the worker; errors of all rows of a step, and of rows that depend on failed ones
device_pauses.py how long the device was idle before each step
shaping.py      rows under a grammar: their sampling waits for their token masks
graphs.py       decode steps from captured graphs; prompt_graphs.py: steps with few prompt tokens
pending.py      a step in flight, and its outcome; meter.py: the cost of steps

Law: launching a step never waits for the device; only `ModelRunner.finish` does. A faulty row fails alone. Entry
points: `kvforge.worker.__main__` starts `loop.Worker`; benchmarks and tests drive `engine.Engine` and
`runner.ModelRunner`.
"""
