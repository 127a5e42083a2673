"""How far sampling and inserting may run ahead of each other."""

from dataclasses import dataclass

from dovetail.errors import UserError


@dataclass
class RateLimiter:
    """Counts items inserted and sampled, and says who may go on.

    Sampling waits until `min_size` items have been inserted. From then on the items sampled stay
    within `tolerance` of `samples_per_insert` × (items inserted − `min_size`): the side that is
    ahead waits. Without `samples_per_insert` only the minimum holds.
    """

    min_size: int = 1
    """Items that must have been inserted before the first is sampled."""
    samples_per_insert: float | None = None
    """Samples of each item, on average."""
    tolerance: float = 0.0
    """Sampled items by which either side may be ahead."""
    inserted: int = 0
    sampled: int = 0

    def __post_init__(self) -> None:
        if self.min_size < 1:
            raise UserError(f"The rate limiter's min_size is {self.min_size}: give at least 1.")
        if self.samples_per_insert is None:
            return
        if not 0 < self.samples_per_insert < float("inf"):
            raise UserError(
                f"samples_per_insert is {self.samples_per_insert}: give a positive number, or None."
            )
        if not self.tolerance >= max(1.0, self.samples_per_insert):
            raise UserError(
                f"The rate limiter's tolerance is {self.tolerance}: give at least "
                f"{max(1.0, self.samples_per_insert):g}, or an insert and a sample could each "
                "wait for the other."
            )

    @property
    def filled(self) -> bool:
        """Whether the first items may be sampled."""
        return self.inserted >= self.min_size

    @property
    def ahead(self) -> float:
        """Sampled items beyond what the inserted ones ask for; negative: inserting is ahead."""
        if self.samples_per_insert is None:
            return 0.0
        return self.sampled - self.samples_per_insert * (self.inserted - self.min_size)

    def may_insert(self, count: int) -> bool:
        """Whether `count` more items may be inserted; up to the minimum they always may."""
        if self.samples_per_insert is None or self.inserted + count <= self.min_size:
            return True
        return self.ahead - self.samples_per_insert * count >= -self.tolerance

    def may_sample(self, count: int) -> bool:
        """Whether `count` more items may be sampled."""
        if not self.filled:
            return False
        return self.samples_per_insert is None or self.ahead + count <= self.tolerance

    def insert(self, count: int) -> None:
        """Counts items inserted."""
        self.inserted += count

    def sample(self, count: int) -> None:
        """Counts items sampled."""
        self.sampled += count

    def explain(self, inserting: int = 1, sampling: int = 1) -> str:
        """What each side waits for, in one sentence."""
        return f"{self._why_sample(sampling)}; {self._why_insert(inserting)}."

    def _why_sample(self, count: int) -> str:
        if self.may_sample(count):
            return f"sampling {count} may go on"
        if not self.filled:
            return (
                f"sampling waits for {self.min_size} items, of which {self.inserted} are inserted"
            )
        assert self.samples_per_insert is not None
        missing = (self.ahead + count - self.tolerance) / self.samples_per_insert
        return f"sampling {count} waits for {_whole(missing)} more items to be inserted"

    def _why_insert(self, count: int) -> str:
        if self.may_insert(count):
            return f"inserting {count} may go on"
        assert self.samples_per_insert is not None
        missing = self.samples_per_insert * count - self.tolerance - self.ahead
        return f"inserting {count} waits for {_whole(missing)} more items to be sampled"


def _whole(number: float) -> int:
    return max(1, -int(-number // 1))
