"""Thinwire inside other training frameworks."""
