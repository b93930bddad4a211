"""Entry of the ``thinwire`` program, also as ``python -m thinwire``: from here on Ctrl-C leaves no traceback."""

try:
    import os
    import signal
    import sys
except KeyboardInterrupt:  # typed before the program could ask for anything else
    raise SystemExit(130) from None


def start() -> None:
    """Open closed streams, let Ctrl-C end the process silently until the program can say it in a line; run it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else somebody ignores it, as nohup does
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # closed, as by ``>&-``: what is opened next would get its number, and its output
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))
    from thinwire.cli.program import program

    program()


if __name__ == "__main__":
    start()
