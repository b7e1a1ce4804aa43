"""What can go wrong in a recipe, as the command line tells it."""


class RecipeError(ValueError):
    """A mistake that the user can mend; shown as one line."""


class SiteError(RuntimeError):
    """A site ended before its work was done.

    Attributes:
        lost: Numbers of sites whose processes ended without a word, as a killed one does.
    """

    lost: frozenset[int] = frozenset()


class CheckError(RuntimeError):
    """What was measured is not what was promised."""
