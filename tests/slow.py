"""The tests that the default run leaves out because they take long: `slow.txt`, one test a line, made from a log.

    python -m pytest -m 'not programs and not exhaustive and not cluster' -vv --durations=0 > log
    python -m tests.slow log

`conftest.py` marks them as slow. A test that is not in the list, such as a new one, is in the default run.
"""

import re
import sys
from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")
SECONDS = 0.8
"""The default run has about 3,000 tests and is to take less than five minutes on two cores."""


def listed() -> frozenset[str]:
    return frozenset(LIST.read_text(encoding="utf-8").splitlines())


def chosen(log: str) -> list[str]:
    """The tests whose call took long, in the order of their files. What a fixture took, the next test would take."""
    calls = re.findall(r"^\s*([\d.]+)s call\s+(.+?)\s*$", log, re.M)
    return sorted(name for seconds, name in calls if float(seconds) >= SECONDS)


if __name__ == "__main__":
    names = chosen(Path(sys.argv[1]).read_text(encoding="utf-8"))
    LIST.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    print(f"{len(names)} tests of {SECONDS} s and longer")
