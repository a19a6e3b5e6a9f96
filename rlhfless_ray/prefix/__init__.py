"""Prefix KV: every distinct prompt prefix computed once in the cluster, found by its content."""
