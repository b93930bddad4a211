"""What will be sent, and what memory and time that takes, before the run."""
