"""The plan: what will be sent, and what memory that takes, before the run."""
