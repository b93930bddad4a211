"""The ranks of a run: how they start, agree, end, and what they show and write."""
