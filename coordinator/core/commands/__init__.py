"""What clients ask: a handler for each message.

Law: a command that is refused raises a typed error that names what was wrong, and has changed nothing. A handler checks
and hands over; what must hold for ever is kept by the rooms below.

From outside: the machine calls the handlers; what only reads (`find`, `info`) may be used by the reports too.
"""
