"""The matrix of docs/training.md: ten scripts as people write them under every strategy, on two ranks.

What comes of each cell must be what the document says: `python benchmarks/training.py --only matrix` writes
its table.
"""

import pytest
from contracts import CONTRACTS
from matrix import CELLS, documented, gist, outcomes
from scripts import SCRIPTS

from paceline.train import strategies

DOCUMENTED, SECTION = documented()


@pytest.fixture(scope="module")
def found(request):
    """Outcomes of the cells that are asked for, from one pair of ranks and one pair of workers that do not
    wait for each other.
    """
    calls = [
        item.callspec
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    return outcomes([call.params["cell"] for call in calls])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_script_under_strategy(cell, found):
    outcome, why = found[cell]
    assert outcome != "failed", why
    assert outcome == DOCUMENTED[cell]
    assert outcome != "refused" or gist(cell[0], why) in SECTION


def test_contracts_are_of_strategies_that_there_are():
    assert set(CONTRACTS) == set(strategies.names())


def test_the_document_shows_every_cell_and_no_other():
    assert set(DOCUMENTED) == set(CELLS)
    assert len(SCRIPTS) == 10
