"""The laboratory: an emulated cluster with slow links on one machine, and ``thinwire compare`` on top of it."""
