"""Several coordinators behind one gateway: who is there, who gets a request, what becomes of it when that one dies."""
