"""Marks, and a failure, that several test files need."""

import pytest

from harness import OVER_VERBS, PROVIDERS

two_providers = pytest.mark.parametrize("provider", ["", "shm"], ids=["default", "shm"])
each_provider = pytest.mark.parametrize("provider", PROVIDERS,
                                        ids=[p or "default" for p in PROVIDERS])


def over(programs):
    """For tests of what all programs share, letter for letter: each of them over
    libfabric's first choice, and two of them over shm as well."""
    pairs = [(program, "") for program in programs]
    pairs += [(program, "shm") for program in ("7_queue", "13_crowd") if program in programs]
    return pytest.mark.parametrize("program,provider", pairs, ids=[
        f"{program}-{provider or 'default'}" for program, provider in pairs])


# For tests in which a client goes while a message to it is on its way that is too long
# for tcp;ofi_rxm to copy. Then that layer keeps something of it: see "close" in the
# appendix of providers. Only the servers of chapters 5 and 12 send such messages; that of
# 4 gets them, from clients that may be killed while it fetches one.
def ends_in_a_rendezvous(test):
    for program in "4_hello", "5_reverse", "12_sleep":
        test = pytest.mark.may_warn("fi_close: Device or resource busy", "tcp;ofi_rxm",
                                    program)(test)
    return test


def nothing_wrong(messages):
    """Fails with the messages of a check alone, each of which names a place."""
    if messages:
        pytest.fail("\n".join(messages), pytrace=False)


def not_over_verbs(why):
    return pytest.mark.skipif(bool(OVER_VERBS), reason=why)


takes_shm = pytest.mark.skipif("shm" not in PROVIDERS, reason="shm is not here")
takes_strict = not_over_verbs("strict.so stands between the programs and tcp or shm")
