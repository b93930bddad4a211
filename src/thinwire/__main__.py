"""Entry of the ``thinwire`` program, also as ``python -m thinwire``: from here on Ctrl-C leaves no traceback."""

try:
    import signal
except KeyboardInterrupt:  # typed before the program could ask for anything else
    raise SystemExit(130) from None


def start() -> None:
    """Let Ctrl-C end the process silently until the program can say it in a line; run the program."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else somebody ignores it, as nohup does
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from thinwire.cli.program import program

    program()


if __name__ == "__main__":
    start()
