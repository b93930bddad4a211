"""The ``thinwire`` program."""
