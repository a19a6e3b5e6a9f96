"""The command line. Imports stay light: --help answers at once."""
