"""Who sends what was planned and notes what came: the loop of one driver process, its targets, and several of them."""
