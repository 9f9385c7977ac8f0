"""The API. Each route parses, asks for a role and calls one function that knows no HTTP."""
