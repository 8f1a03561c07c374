"""What nobody sees of 10_lock from the outside: inside_lock.cpp contains its code."""

import os

from harness import BUILD
from marks import two_providers
from repository import ROOT


@two_providers
def test_ledger_that_changes(run, provider):
    """A client that READs the ledger without a lock READs it again if it is not the
    valid one any more. A record with half of a version is not taken for a free one, nor one
    with a new version and old data for a whole one."""
    process = run([os.path.join(ROOT, BUILD, "inside_lock")], provider)
    assert process.wait(30) == 0 and "READs: 2," in process.output, process.output
