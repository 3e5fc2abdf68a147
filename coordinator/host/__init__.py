"""The host around the coordinator: its clock and folders, limits of the process, garbage collection, random ids."""
