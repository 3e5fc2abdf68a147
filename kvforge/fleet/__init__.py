"""`kvforge fleet`: replicas and gateways placed and supervised by an existing Ray cluster.

Ray places and supervises programs and carries their status; no token, prompt or secret of a coordinator passes through
it. A replica on a node is what `kvforge up` runs, and a gateway is `python -m kvforge.gateway`; they connect over
`tcp://` with CURVE. All state can be queried again, so that any part may crash and recover.

`deciding` computes the actions, without a clock, Ray or input and output. `node` holds the two programs that run on
nodes, without Ray. `cluster` is the thin layer over Ray, and the only package that imports it. `settings` is the file,
`messages` those between the parts.
"""
