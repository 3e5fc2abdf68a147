"""`kvforge up`: a coordinator and its workers as children of one process in the foreground.

Its law: nothing outlives the supervisor, however it ends, and it removes nothing that it did not make. It speaks to
the service only as a client, and knows of coordinator and worker no more than their command lines and configuration
files.

From outside: `supervisor.Supervisor` and `run_up`, with the `Settings` they take (`settings`, `up_file`), `Voice`, and
the checks of `host`. `entry.py` is not imported but run, in each child.
"""
