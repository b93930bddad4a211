"""The building blocks that several methods share."""
