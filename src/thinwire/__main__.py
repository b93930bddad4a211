"""What the installed ``thinwire`` and ``python -m thinwire`` call: the program, which Ctrl-C ends from here on."""

import signal


def start() -> None:
    """Let Ctrl-C end the process silently until the program can say it in a line; run the program."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else somebody ignores it, as nohup does
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from thinwire.cli.program import program

    program()


if __name__ == "__main__":
    start()
