"""The worker: one GPU's weights, its KV memory, and the execution of the steps that the coordinator sends.

Law: a worker makes no scheduling decision. Each package may import only those after it in this order: step; loading;
kernels; attention and sampling; device.
"""
