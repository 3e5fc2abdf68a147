"""`kvforge up`: a coordinator and its workers as children of one process in the foreground.

No child outlives the supervisor, however it ends, and the supervisor removes only files that it created. It talks to
the service only as a client, and uses only the command lines and configuration files of coordinator and worker.

Other code uses `supervisor.Supervisor` and `run_up`, with their `Settings` (`settings`, `up_file`), `ConsoleReporter`,
and the checks of `host`. `entry.py` is not imported but run, in each child.
"""
