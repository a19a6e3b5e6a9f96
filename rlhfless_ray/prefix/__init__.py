"""Prefix KV: compute every distinct prompt prefix once in the cluster, and find it by its content."""
