"""The live page: blocks, tenants, requests and workers as they are now, in any browser, from `/` on.

Law: looking costs the coordinator next to nothing. One `Sampler` a process reads the shared tables and asks a few
questions a second for all viewers together, and none where nobody looks. What a viewer has not got is always made anew
from the present state: nothing is queued for one that reads slowly. Only `actions` changes anything, and only for who
has the right.
"""
