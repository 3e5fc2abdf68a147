"""The client library: a connection to a coordinator, for asyncio (`aio`) and for blocking code (`blocking`).

Its law: nothing here keeps state of the service. What a caller asks for becomes one message, the coordinator decides,
and what it says is passed on unchanged. Every wait has an end, and no thread is started. Numbers and names are checked
before anything is sent, each mistake naming its argument.

The way of a call: `aio.client` says it; `exchanges` makes one message and reads its answer, or `operations` takes more
steps; `connection` sends and waits; `session` knows who waits for what; `link` holds the socket. The blocking client
goes the same way, with another wait.

From outside: the names that `kvforge` lists (`Client`, `AsyncClient`, `Sampling`, `Tables`, ...). The command line may
also use `arguments`, `options` and `sampling`, to refuse an option in the same words. Nobody touches a session or a
link.
"""
