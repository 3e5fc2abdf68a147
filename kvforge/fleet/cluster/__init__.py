"""The fleet in a Ray cluster: the only package that imports Ray, kept thin.

`deciding` makes the decisions, and `node` holds the programs. Here, names become actors and placement groups, and their
status is queried. Ray holds all state that outlives the controller: the actors, which have their revision in their
names, and one document in the cluster's key-value store (`store`).

Other code uses `joining.joined` and `fleet_client.FleetClient`.
"""
