"""A plugin of pytest that prints the CPU seconds of each folder, file and test.

    PYTHONPATH=tests .venv/bin/python -m pytest -p cpu_seconds --numprocesses 2 --dist loadfile

Counts the process of the test and all that it started, the ranks of gloo worlds among them; not
collection and imports. `--cpu-seconds FILE` also writes every test into a file.
"""

from collections import Counter
from pathlib import Path

import psutil
import pytest

PROPERTY = "CPU seconds"


def used() -> float:
    """Of this process, of what it started, and of what has ended below these."""
    me, total = psutil.Process(), 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])  # user and system, its own and its children's
        except psutil.NoSuchProcess:  # counted with its parent from now on
            continue
    return total


class Seconds:
    def __init__(self) -> None:
        self.tests: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item):
        item.cpu_before = used()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item):
        result = yield
        item.user_properties.append((PROPERTY, used() - item.cpu_before))
        return result

    def pytest_runtest_logreport(self, report):  # in the process that started the others, too
        if report.when == "teardown":
            self.tests[report.nodeid] += dict(report.user_properties)[PROPERTY]

    def pytest_terminal_summary(self, terminalreporter, config):
        folders, files = Counter(), Counter()
        for test, seconds in self.tests.items():
            file = test.partition("::")[0]
            files[file] += seconds
            folders[str(Path(file).parent)] += seconds
        terminalreporter.section(f"{sum(folders.values()):.0f} CPU seconds")
        for counts, number in ((folders, None), (files, 25), (self.tests, 25)):
            for name, seconds in counts.most_common(number):
                terminalreporter.write_line(f"{seconds:8.1f}  {name}")
            terminalreporter.write_line("")
        if config.option.cpu_seconds:
            lines = [f"{seconds:.2f}\t{test}\n" for test, seconds in self.tests.most_common()]
            Path(config.option.cpu_seconds).write_text("".join(lines))


def pytest_addoption(parser):
    help = "write the CPU seconds of every test into this file"
    parser.addoption("--cpu-seconds", metavar="FILE", help=help)


def pytest_configure(config):
    config.pluginmanager.register(Seconds())
