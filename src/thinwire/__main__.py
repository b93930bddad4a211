from thinwire.cli.program import program

if __name__ == "__main__":
    program()
