"""One GPU's part: its weights, its KV memory, and the steps that the coordinator sends.

Law: it decides nothing. Rooms, each above those after it: step; loading; kernels; attention and sampling; device.
"""
