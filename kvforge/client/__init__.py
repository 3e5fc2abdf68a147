"""The client library: a connection to a coordinator, for blocking code and for asyncio.

Its law: nothing here keeps state of the service. What a caller asks for becomes one message, the coordinator decides,
and what it says is passed on unchanged. Every wait has an end, and no thread is started. Numbers and names are checked
before anything is sent, each mistake naming its argument.

From outside: the names that `kvforge` lists (`Client`, `AsyncClient`, `Sampling`, `Tables`, ...). The command line may
also use `arguments`, `options` and `sampling`, to refuse an option in the same words. Nobody touches a session or a
link.
"""
