"""What workers say, and what follows from it.

Law: a worker that breaks the rules is refused and dropped, and nobody else notices; with a worker its blocks are gone,
and nothing else: its requests wait for another place.

From outside: the machine hands over what came; the workers that are connected may be read.
"""
