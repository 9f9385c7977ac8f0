"""A team's server: records and jobs over HTTP, tokens, an audit log, pages. Imported by the CLI.

A request goes through `limits` (large bodies, guessed tokens), `access` (token, role) and `routes`.
Routes call plain functions, which know no HTTP, on a session of the `database`.
"""
