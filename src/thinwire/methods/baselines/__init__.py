"""The methods that the five systems build on, or are measured against."""
