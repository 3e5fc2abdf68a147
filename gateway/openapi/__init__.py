"""`/openapi.json` and `/docs`: routes and fields, generated from the structures that decode them."""
