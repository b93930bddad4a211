"""The one exception that a user of Thinwire is meant to read."""


class ThinwireError(Exception):
    """Something that was asked for cannot be had. The message is one line: what is wrong, and what to do instead."""
