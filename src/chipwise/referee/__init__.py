"""Verdicts on changes: what a change to a recipe or to its code really did."""

from .referee import Verdict, referee

__all__ = ["Verdict", "referee"]
