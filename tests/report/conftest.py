"""Drawing for the tests of what people see."""

import pytest
from rich.console import Console


@pytest.fixture
def drawn():
    """The lines of a view in a terminal of some width."""

    def draw(view, width):
        console = Console(width=width, color_system=None)
        with console.capture() as captured:
            console.print(view)
        lines = captured.get().splitlines()
        assert max(map(len, lines)) <= width
        return [line.rstrip() for line in lines]

    return draw
