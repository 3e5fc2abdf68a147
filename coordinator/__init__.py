"""The coordinator: the one process that owns every block and serialises every mutation."""
