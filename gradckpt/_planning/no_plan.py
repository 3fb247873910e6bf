"""No plan stays within a budget: :class:`NoPlan`."""

from __future__ import annotations

from gradckpt._apart import shown_as_base
from gradckpt._planning.budget import Budget
from gradckpt._planning.choose import Choice
from gradckpt._stats import format_bytes

__all__ = ["NoPlan"]


@shown_as_base
class NoPlan(ValueError):
    """No plan stays within the budget. ``smallest_budget``: bytes of the one that needs least, what
    the step adds if the budget was of activations; and ``choice``, that one.
    """

    def __init__(self, message: str, smallest_budget: int, choice: Choice) -> None:
        super().__init__(message)
        self.smallest_budget = smallest_budget
        self.choice = choice

    @classmethod
    def within(cls, budget: Budget, smallest: int, choice: Choice, hint: str) -> NoPlan:
        """Return the error of a budget; ``smallest``: bytes; ``hint``: a sentence."""
        of = " of activations" if budget.step_only else ""
        return cls(
            f"gradckpt: no plan stays within {budget.text}; the smallest budget is {format_bytes(smallest)} "
            f"({smallest} bytes){of}. {hint}",
            smallest,
            choice,
        )
