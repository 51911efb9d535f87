"""Layouts that must learn alike, and the ranks that run them."""
