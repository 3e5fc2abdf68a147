"""`kvforge fleet`: replicas and gateways placed and supervised by an existing Ray cluster.

Its law: Ray places, supervises and tells; no token, prompt or secret of a coordinator passes through it. A replica on a
node is what `kvforge up` is, a gateway is `python -m kvforge.gateway`, and they meet over `tcp://` with CURVE. Whoever
dies is found again: nothing is known that could not be asked for once more.

`deciding` says what is to be done, without a clock, Ray or input and output; `node` are the two programs that run on
nodes, without Ray; `cluster` is the thin part that knows Ray, and the only one that imports it. `settings` is the file,
`told` what they say to each other.
"""
