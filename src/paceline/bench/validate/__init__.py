"""The accuracy scoreboard: measured steps and operators, each predicted from its configuration alone."""

from paceline.bench.validate.score import Score, board, run

__all__ = ["Score", "board", "run"]
