"""`/openapi.json` and `/docs`: the paths and fields of this service, described by the structures that read them."""
