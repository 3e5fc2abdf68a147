"""A coordinator with workers that have no model: they answer steps at the pace of a measured one."""
