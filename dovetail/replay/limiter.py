"""Bounds how far sampling and inserting may run ahead of each other."""

from dataclasses import dataclass

from dovetail.errors import UserError


@dataclass
class RateLimiter:
    """Counts inserted and sampled items, and decides which operation may proceed.

    Sampling waits until `min_size` items have been inserted. From then on the number of sampled
    items stays within `tolerance` of `samples_per_insert` × (items inserted − `min_size`): the
    operation that is ahead waits. Without `samples_per_insert` only the minimum applies. Not
    thread-safe: the caller holds the table's lock.
    """

    min_size: int = 1
    """Items that must have been inserted before the first sample."""
    samples_per_insert: float | None = None
    """Average number of times each item is sampled."""
    tolerance: float = 0.0
    """Number of sampled items by which either operation may be ahead."""
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
        # A single item inserted or sampled must fit into the tolerance.
        if not self.tolerance >= max(1.0, self.samples_per_insert):
            raise UserError(
                f"The rate limiter's tolerance is {self.tolerance}: give at least "
                f"{max(1.0, self.samples_per_insert):g}, or an insert and a sample could each "
                "wait for the other."
            )

    @property
    def filled(self) -> bool:
        """Whether sampling may start."""
        return self.inserted >= self.min_size

    @property
    def ahead(self) -> float:
        """Items sampled beyond the target ratio; negative when inserting is ahead."""
        if self.samples_per_insert is None:
            return 0.0
        return self.sampled - self.samples_per_insert * (self.inserted - self.min_size)

    def may_insert(self, count: int) -> bool:
        """Whether `count` more items may be inserted; always true below the minimum size."""
        if self.samples_per_insert is None or self.inserted + count <= self.min_size:
            return True
        # Each inserted item allows `samples_per_insert` more samples, and so lowers `ahead` by
        # that.
        return self.ahead - self.samples_per_insert * count >= -self.tolerance

    def may_sample(self, count: int) -> bool:
        """Whether `count` more items may be sampled."""
        if not self.filled:
            return False
        return self.samples_per_insert is None or self.ahead + count <= self.tolerance

    def insert(self, count: int) -> None:
        """Records `count` inserted items."""
        self.inserted += count

    def sample(self, count: int) -> None:
        """Records `count` sampled items."""
        self.sampled += count

    def explain(self, inserting: int = 1, sampling: int = 1) -> str:
        """One sentence on what sampling and inserting are waiting for."""
        return f"{self._why_sample(sampling)}; {self._why_insert(inserting)}."

    def _why_sample(self, count: int) -> str:
        """Why sampling `count` items may or may not proceed."""
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
