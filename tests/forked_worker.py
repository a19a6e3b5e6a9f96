"""Do what execnet passes to `python -u -c`, in a process of xdist that is forked from the tests' server."""

import sys

if __name__ == "__main__":
    exec(sys.argv[-1])
