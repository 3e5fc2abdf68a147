"""The client library: a connection to a coordinator, for asyncio (`aio`) and for blocking code (`blocking`).

Rules of this package:

- It keeps no state of the service. Each call becomes one message, the coordinator decides, and its reply is returned
  unchanged.
- Every wait has a deadline, and no thread is started.
- Arguments are checked before anything is sent, and each error names the argument.

A call passes through these modules: `aio.client` declares it; `exchanges` builds one message and reads its reply, or
`operations` takes several steps; `connection` sends and waits; `session` matches replies to commands; `link` holds the
socket. The blocking client takes the same path with another wait.

Other code imports the names that `kvforge` lists (`Client`, `AsyncClient`, `SamplingParams`, `Tables`, ...). The
command line also uses `arguments`, `options` and `sampling`, to report wrong options in the same words. Sessions and
links are private.
"""
