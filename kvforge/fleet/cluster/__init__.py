"""The fleet in a Ray cluster: the only room that imports Ray, and as little of it as there can be.

Its law: what is decided is decided in `deciding`, what runs is run by `node`; here names become actors and placement
groups, and what they say is asked for. All that must outlive the controller is in Ray: the actors by their names, which
hold their revision, and one document in the cluster's key-value store (`store`).

From outside: `joining.joined` and `Fleet` of `fleet`.
"""
