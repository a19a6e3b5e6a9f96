"""Policies and weight versions as values: folders as bytes, versions pulled by their users."""
