"""A sample of measurements in five numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and extremes of a sample; a single number is all five."""

    median: float
    lower_quartile: float
    upper_quartile: float
    least: float
    most: float

    @staticmethod
    def of(sample: Sequence[float]) -> Spread:
        """Sum up a sample of at least one number.

        Raises:
            ValueError: The sample is empty.
        """
        if not sample:
            raise ValueError("a spread needs at least one number, got none")
        least, most = min(sample), max(sample)
        if len(sample) == 1:
            return Spread(least, least, least, least, most)
        # "inclusive" keeps the quartiles of two or three numbers between the extremes.
        lower, median, upper = statistics.quantiles(sample, n=4, method="inclusive")
        return Spread(median, lower, upper, least, most)

    def overlaps(self, other: Spread) -> bool:
        """Whether the ranges of the two samples share a number."""
        return self.least <= other.most and other.least <= self.most

    def as_dict(self) -> dict[str, float]:
        """The five numbers, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"
