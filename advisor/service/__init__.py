"""The server of a team: records and jobs over HTTP, tokens, an audit log, pages. Known by the CLI.

A request goes through `limits` (size, time, headers), `access` (whose token, which role, how often)
and `routes`, which call plain functions on a session of the `database`: these know no HTTP.
"""
