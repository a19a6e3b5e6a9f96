"""What one run shares between its stages, and its files on disk."""
