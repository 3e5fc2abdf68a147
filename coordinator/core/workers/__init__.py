"""Workers: handling of their messages, and of their ends.

A worker that violates the protocol is refused and dropped without effect on others. With a worker, only its blocks
are lost: its requests are scheduled elsewhere.

The machine delivers the messages. Other packages may read the connected workers.
"""
