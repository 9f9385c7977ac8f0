"""The pilot: what sits in a run that nobody rewrote. It finds what trains, and sets configs there.

`start` is called where torch has just been loaded; from then on nothing of the script is touched
until its first steps have shown what it trains.
"""
