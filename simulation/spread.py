"""How far from its modelled time is a step, and from the steps around it?

A mean hides the tail, so the ratios of real to modelled times are kept as they were. Short steps and long
ones have ratios of their own: a pause of 20 ms, in which another process had the core, makes a step of 2 ms
ten times as long and one of 200 ms a tenth longer. And slow steps come together: a neighbour stays for a
while. So what is drawn is a run of ranks, in the order in which the recorded steps had them among those of
their size, and a rank becomes a ratio by the size of the step that is simulated.

A neighbour also makes the batches larger: where steps are slow, more requests are there at once. Were load
and size not told apart, a large batch would cost what its neighbours cost, and so more than it does where
there are none. So the load of each stretch of steps is taken out before costs and ratios are, and drawn with
the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
STEPS_A_SIZE = 100  # at least: their ratios are a distribution up to p99
MOST_SIZES = 12
STEPS_A_STRETCH = 32  # of which the load is a median: a few slow steps are no load


@dataclass(frozen=True, slots=True)
class Spread:
    """Ratios of real to modelled times, by the modelled time; all of them in the order of their ranks."""

    up_to_s: Vector  # modelled times that part one size from the next, rising
    ratios: tuple[Vector, ...]  # of each size, rising
    ranks: Vector  # of the recorded steps in their order: from 0 to 1, among the steps of their size
    loads: Vector  # of the recorded steps in their order: how much longer all work took around them

    def ratio(self, modelled_s: float, at: int) -> float:
        """Of a step of this modelled time, which goes as the recorded step number `at` went."""
        of_size = self.ratios[int(self.up_to_s.searchsorted(modelled_s))]
        return float(self.loads[at] * of_size[int(self.ranks[at] * len(of_size))])


def loads(ratios: Vector) -> Vector:
    """How much longer than modelled the steps of each stretch took; 1 in the mean."""
    stretches = np.array_split(ratios, max(1, len(ratios) // STEPS_A_STRETCH))
    found: Vector = np.repeat([np.median(each) for each in stretches], [len(each) for each in stretches])
    found /= found.mean()
    return found


def spread(taken_s: Vector, modelled_s: Vector, loads: Vector) -> Spread:
    """The spread of steps that took so long, in their order."""
    count = max(1, min(MOST_SIZES, len(taken_s) // STEPS_A_SIZE))
    up_to_s = np.unique(np.quantile(modelled_s, np.arange(1, count) / count))
    size_of = up_to_s.searchsorted(modelled_s)
    sizes, size_of = np.unique(size_of, return_inverse=True)  # without those that no step has
    ratios, ranks = [], np.empty(len(taken_s))
    for size in range(len(sizes)):
        steps = np.flatnonzero(size_of == size)
        here = taken_s[steps] / (modelled_s[steps] * loads[steps])
        order = here.argsort(kind="stable")
        ranks[steps[order]] = (np.arange(len(steps)) + 0.5) / len(steps)
        ratios.append(here[order].round(5))
    return Spread(up_to_s[sizes[:-1]], tuple(ratios), ranks.round(6), loads.round(5))
