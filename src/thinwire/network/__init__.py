"""The only access to the network: collectives, what they send, whether ranks are still there."""
