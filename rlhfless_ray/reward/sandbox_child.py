"""Run untrusted code with tests. Started as `python -I -S`, with a job in JSON on standard input; prints `passed` or `failed`.

Each test has a process of its own, in new namespaces without a network where the kernel lets users make them, with limits on
processor time, memory, file sizes and open files, and without this process's environment. It imports nothing of the package.
"""

import ast
import contextlib
import ctypes
import io
import json
import os
import resource
import secrets
import sys

NEW_USER, NEW_NET, NEW_PID, NEW_IPC = 0x10000000, 0x40000000, 0x20000000, 0x08000000  # of unshare(2)
KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG
SIGKILL = 9
MOST_OUTPUT = 1 << 20  # bytes that are read of a test's output
FILES, PROCESSES, CPU_SLACK_S = 64, 64, 1


def isolate() -> bool:
    """Enter namespaces without network and other processes. Returns whether they have users of their own, whose processes are counted.

    Without the right to make them, the limits below still hold.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(KILL_WITH_PARENT, SIGKILL)
    for flags in (NEW_USER | NEW_NET | NEW_PID | NEW_IPC, NEW_NET | NEW_PID | NEW_IPC):  # the second one: root without user namespaces
        if libc.unshare(flags) == 0:
            return bool(flags & NEW_USER)
    return False


def limit(job: dict, *, counts_processes: bool) -> None:
    seconds = int(job["limit_s"]) + CPU_SLACK_S
    for kind, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_FSIZE, job["file_bytes"]),
        (resource.RLIMIT_NOFILE, FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    if counts_processes:
        resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))


def passes(code: str, test: dict) -> bool:
    """Run one test in a forked process, and read what it says through a pipe."""
    ours, theirs = os.pipe()
    nonce = secrets.token_hex(16)
    child = os.fork()
    if child == 0:
        os.close(ours)
        with contextlib.suppress(BaseException):
            say = _checked(code, test, nonce)
            os.write(theirs, say.encode()[: MOST_OUTPUT + 1])
        os._exit(0)
    os.close(theirs)
    said = b""
    while len(said) <= MOST_OUTPUT and (part := os.read(ours, 1 << 16)):
        said += part
    os.close(ours)
    with contextlib.suppress(OSError):
        os.kill(child, SIGKILL)
    os.waitpid(child, 0)
    text = said.decode(errors="replace")
    return text == nonce if "assertions" in test or test["fn_name"] else _same_output(text, str(test["output"]))


def _checked(code: str, test: dict, nonce: str) -> str:
    """Return the nonce if assertions hold or a function's result is right, or else what the program printed."""
    space: dict = {"__name__": "__main__"}
    silent = io.StringIO()
    if "assertions" in test:
        with contextlib.redirect_stdout(silent):
            exec(compile(code, "response", "exec"), space)
            exec(compile(test["assertions"], "tests", "exec"), space)
        return nonce
    if test["fn_name"]:
        with contextlib.redirect_stdout(silent):
            exec(compile(code, "response", "exec"), space)
            function = space.get(test["fn_name"]) or getattr(space["Solution"](), test["fn_name"])
            result = function(*_arguments(test["input"]))
        wanted = _value(test["output"])
        same = _plain(result) in (wanted, wanted[0] if isinstance(wanted, list) and len(wanted) == 1 else wanted)
        return nonce if same else ""
    given = test["input"] if isinstance(test["input"], str) else "\n".join(map(str, test["input"]))
    sys.stdin = io.TextIOWrapper(io.BytesIO(given.encode()))
    with contextlib.redirect_stdout(silent), contextlib.suppress(SystemExit):
        exec(compile(code, "response", "exec"), space)
    return silent.getvalue()


def _arguments(given: object) -> list:
    """Return a call's arguments: a list, or a text with one JSON value a line."""
    return [_value(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else list(given)  # type: ignore[call-overload]


def _value(text: object) -> object:
    """Return the JSON value or Python literal of a text. Other values and texts are themselves."""
    if isinstance(text, str):
        with contextlib.suppress(ValueError):
            return json.loads(text)
        with contextlib.suppress(ValueError, SyntaxError):
            return ast.literal_eval(text)
    return text


def _plain(value: object) -> object:
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _same_output(said: str, wanted: str) -> bool:
    """Compare line by line, without spaces at the ends of lines and empty lines at the end."""
    lines, others = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (said, wanted))
    return lines == others


def main() -> None:
    job = json.load(sys.stdin)
    is_counted = isolate()
    child = os.fork()  # the first process of the new namespace: when it ends, all others there end too
    if child == 0:
        limit(job, counts_processes=is_counted)
        said = b"passed" if all(passes(job["code"], test) for test in job["tests"]) else b"failed"
        os.write(1, said)
        os._exit(0)
    os.waitpid(child, 0)


if __name__ == "__main__":
    main()
