"""The two programs that a keeper runs on a node: a replica, which is what `kvforge up` runs, and a gateway.

Its law: no thread and no Ray; nothing outlives the program that it did not leave on purpose (the journal, the key and
the port of a replica that is to come again); what is secret goes into files that are their owner's alone, never into a
command line, an environment or a log.

Started as `entry.py kvforge.fleet.node KIND --link DESCRIPTOR`: over the link it hears orders and says how it is.
"""
