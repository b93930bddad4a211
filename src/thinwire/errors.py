"""The one exception, and the one warning, that a user of Thinwire is meant to read."""


class ThinwireError(Exception):
    """Something that was asked for cannot be had. The message is one line: what is wrong, and what to do instead."""


class ThinwireWarning(UserWarning):
    """Something that works, and hardly does what it was asked for. One line, like an error."""
