"""The fixtures and hooks of pytest, for the tests and for the checks of exercises. What they
need without pytest is in tests/harness.py."""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
# Some tests import what they check: bench.py, chapters.py, moves.py and carry.py.
sys.path += [f"{HERE}/{folder}" for folder in ("tests", "bench", "book", "moves", ".")]
# So that a failed assertion in these says what it has compared, too.
pytest.register_assert_rewrite("harness", "fakes", "repository")

from harness import (BUILD, OVER_VERBS, Process, Server, owned_shm_files,  # noqa: E402
                     provider_in, remove_stale_shm_files)
from links import Network, enter_own_network  # noqa: E402
from repository import ALL  # noqa: E402
from table import EXAMPLES, TABLE  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "builds(*names): the builds to test, if not plain alone")
    config.addinivalue_line(
        "markers", "may_warn(pattern, provider, program): it may print this warning")
    config.addinivalue_line("markers", "thorough: only make test-all runs it")
    config.addinivalue_line(
        "markers", "static: make check runs it, because it needs no program that is built")
    config.addinivalue_line(
        "markers", "every_program: with each of them, also where only examples are tried")
    config.addinivalue_line("markers", "long: it waits for more than half a minute")
    if not OVER_VERBS:  # an RDMA device stays behind, with its adapter
        enter_own_network()


def pytest_collection_modifyitems(config, items):
    """What waits long begins first. Begun last, it would have the cores to itself."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if not ALL:
        quick = [item for item in items if not item.get_closest_marker("thorough")]
        left_out = set(items) - each_value_once(quick)
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def params(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def values(item):
    """What a test is run with: a tuple of names and a text for each parametrize, and
    for the build."""
    names = [tuple(re.split("[ ,]+", mark.args[0]))
             for mark in item.iter_markers("parametrize")]
    names += [(name,) for name in params(item) if (name,) not in names and
              not any(name in several for several in names)]
    return {(several, repr([params(item)[name] for name in several]))
            for several in names}


def is_refused(item):
    """Whether the test will be skipped, because its program can't run so."""
    program = params(item).get("program")
    return program in TABLE and params(item).get("provider") in TABLE[program].refused_by


def each_value_once(items):
    """Of a test with all programs, all providers and both builds, as few as have each
    program, each provider and each build once. Of more than four programs only the
    examples, unless the test has the marker every_program."""
    kept = set()
    for _, same in itertools.groupby(
            sorted(items, key=lambda item: item.nodeid.partition("[")[0]),
            key=lambda item: item.nodeid.partition("[")[0]):
        same = [item for item in same if not is_refused(item)]
        programs = {params(item).get("program") for item in same}
        if len(programs) > 4 and not same[0].get_closest_marker("every_program"):
            same = [item for item in same if params(item)["program"] in EXAMPLES] or same
        has = {item: values(item) for item in same}
        missing = set().union(*has.values())
        while missing:
            most = max(same, key=lambda item: len(has[item] & missing))
            kept.add(most)
            missing -= has[most]
        kept.update(item for item in same if not params(item))
    return kept


def pytest_generate_tests(metafunc):
    """Runs a test that takes `build` with the plain programs, unless it says that it is
    about those that have sanitizers, or about both."""
    if "build" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("builds")
        names = marker.args if marker else ("plain",)
        # Sanitizers would take too long on an emulated processor.
        names = ("plain",) if OVER_VERBS else names
        metafunc.parametrize("build", names, indirect=True, scope="session")


# libfabric's issue 11828: ofi_rxm closes a connection and only then handles what had
# arrived over it, for which it uses the connection. No release has it mended yet.
KNOWN_CRASH = "libfabric crashed when a connection was closed: its issue 11828"


def crashed_in_libfabric(process):
    """Whether the kernel says so."""
    return process.popen.poll() == -signal.SIGSEGV and re.search(
        rf"\[{process.popen.pid}\]: segfault .* in libfabric\.so",
        subprocess.run(["dmesg"], check=False, text=True, capture_output=True).stdout)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Over verbs, tells that crash from a failure of ours. What is static needs no more
    than the message."""
    report = (yield).get_result()
    if report.failed and item.get_closest_marker("static"):
        report.longrepr = str(call.excinfo.value) or call.excinfo.exconly()
    processes = getattr(item.funcargs.get("run"), "processes", []) \
        if hasattr(item, "funcargs") else []
    if report.failed and OVER_VERBS and any(map(crashed_in_libfabric, processes)):
        report.outcome, report.wasxfail = "skipped", KNOWN_CRASH


@pytest.fixture(scope="session")
def build(request):
    """The folder of the programs to test. scripts/test.sh has built them, or make
    for an exercise, into $BUILD."""
    return {"plain": BUILD, "sanitized": "build/sanitized"}[request.param]


def is_expected(warning, process, markers):
    """Whether a test says that this program may print this, over its provider."""
    return any(re.fullmatch(f"(\\[\\d+\\] )?warning: {pattern}", warning) and
               provider == provider_in(process.output) and
               program in map(os.path.basename, process.command)
               for pattern, provider, program in (marker.args for marker in markers))


@pytest.fixture
def run(request):
    """Starts processes, and ends those that still run after the test. Its
    new_folder() makes an empty folder that lasts as long. A warning of a program is a
    failure, unless the test has the marker may_warn."""
    processes = []
    folders = []
    if os.path.isdir("/dev/shm"):
        remove_stale_shm_files()

    def start(command, *args, **kwargs):
        process = Process(command, *args, **kwargs)
        processes.append(process)
        return process

    def new_folder():
        # In memory, where there is such a place: many tests move files.
        folders.append(tempfile.mkdtemp(
            dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        return folders[-1]

    start.new_folder = new_folder
    start.processes = processes
    yield start
    for process in processes:
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.wait()
        if process.popen.stdin:
            process.popen.stdin.close()
        process.reader.join()
        process.popen.stdout.close()
    # Removes what those that were killed or that crashed have left behind: the shm
    # provider of a later process with the same number would find its files in use.
    for name in owned_shm_files([p.popen.pid for p in processes]):
        os.unlink("/dev/shm/" + name)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    markers = list(request.node.iter_markers("may_warn"))
    for process in processes:
        unexpected = [warning for warning in process.warnings()
                      if not is_expected(warning, process, markers)]
        assert not unexpected, " ".join(process.command)[:100]


@pytest.fixture
def serve(run, build):
    """Starts a server of a program: serve("4_hello", "shm")."""
    def start(program, provider="", **kwargs):
        if provider in TABLE[program].refused_by:
            pytest.skip("this provider lacks what the program needs")
        return Server(run, build, program, provider, **kwargs)
    return start


# ---- What not every machine permits ----

@pytest.fixture
def network():
    """Two network namespaces, which behave like two hosts, without cables yet: see links.py."""
    network = Network()
    try:
        network.open()
        yield network
    finally:
        network.close()
