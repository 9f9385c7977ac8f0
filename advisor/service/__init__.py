"""A team's server: records and jobs over HTTP, tokens, an audit log, pages. Imported by the CLI.

A request goes through `access` (large bodies, guessed tokens, roles) and `routes`.
Routes call plain functions, which know no HTTP, on a session of the `database`.
"""
