"""Model the spread of real step times around their modelled times.

A mean hides the tail, so the ratios of real to modelled times are kept as they were. Short steps and long
ones have ratios of their own: a pause of 20 ms, in which another process had the core, makes a step of 2 ms
ten times as long and one of 200 ms a tenth longer. And slow steps come together, because a disturbance lasts
for a while. So the simulation draws a run of ranks, in the order in which the recorded steps had them among
those of their size, and a rank becomes a ratio by the size of the simulated step.

A disturbance also makes the batches larger: when steps are slow, more requests are there at once. If load and
size were not separated, a large batch would cost what the disturbance costs, and so more than it does without
one. So the load of each stretch of steps is removed before costs and ratios are fitted, and drawn with the
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
STEPS_A_SIZE = 100  # least number of steps of a size, whose ratios are then a distribution up to p99
MOST_SIZES = 12
STEPS_A_STRETCH = 32  # steps over which the load is a median, so that a few slow steps are no load


@dataclass(frozen=True, slots=True)
class Spread:
    """Ratios of real to modelled times by modelled time, and the ranks of the recorded steps."""

    up_to_s: Vector  # rising modelled times that separate one size from the next
    ratios: tuple[Vector, ...]  # rising ratios of each size
    # Rank of each recorded step among the steps of its size, from 0 to 1, in recorded order
    ranks: Vector
    # How much longer all work took around each recorded step, in recorded order
    loads: Vector

    def ratio(self, modelled_s: float, at: int) -> float:
        """Return the ratio of a step of this modelled time that follows recorded step number `at`."""
        of_size = self.ratios[int(self.up_to_s.searchsorted(modelled_s))]
        return float(self.loads[at] * of_size[int(self.ranks[at] * len(of_size))])


def loads(ratios: Vector) -> Vector:
    """Return how much longer than modelled the steps of each stretch took, normalised to a mean of 1."""
    stretches = np.array_split(ratios, max(1, len(ratios) // STEPS_A_STRETCH))
    found: Vector = np.repeat([np.median(each) for each in stretches], [len(each) for each in stretches])
    found /= found.mean()
    return found


def spread(taken_s: Vector, modelled_s: Vector, loads: Vector) -> Spread:
    """Return the spread of steps that took so long, in their order."""
    count = max(1, min(MOST_SIZES, len(taken_s) // STEPS_A_SIZE))
    up_to_s = np.unique(np.quantile(modelled_s, np.arange(1, count) / count))
    size_of = up_to_s.searchsorted(modelled_s)
    sizes, size_of = np.unique(size_of, return_inverse=True)  # drop the sizes that no step has
    ratios, ranks = [], np.empty(len(taken_s))
    for size in range(len(sizes)):
        steps = np.flatnonzero(size_of == size)
        here = taken_s[steps] / (modelled_s[steps] * loads[steps])
        order = here.argsort(kind="stable")
        ranks[steps[order]] = (np.arange(len(steps)) + 0.5) / len(steps)
        ratios.append(here[order].round(5))
    return Spread(up_to_s[sizes[:-1]], tuple(ratios), ranks.round(6), loads.round(5))
