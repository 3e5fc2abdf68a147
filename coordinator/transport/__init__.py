"""Connections of clients and workers: ZMTP over sockets, with a limit on everything a peer can make it hold.

`router_socket.RouterSocket` is the entry; the other modules are its parts. Nothing here knows the core.
"""
