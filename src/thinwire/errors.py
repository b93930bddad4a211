"""The one exception, and the one warning, that a user of Thinwire is meant to read."""


class ThinwireError(Exception):
    """What was asked for is not possible. The message is one line: what is wrong, and what to do instead.

    Attributes:
        status: what the ``thinwire`` program ends with.
    """

    status = 2


class ThinwireWarning(UserWarning):
    """A setting works but has little effect. The message is one line, like an error's."""
