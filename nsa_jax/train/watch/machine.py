"""Guards over the machine: speed, waiting for data, memory and recompilation."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable

import numpy as np

from nsa_jax.train.errors import TrainingError

_IN_A_ROW = 3  # intervals that must be slow
_SLOW_FOR = 3.0  # seconds that they must last: a toy's intervals are shorter than a hiccup of the machine
_SHORT_WAIT = 0.005  # seconds; only toys' steps are so short that waiting this long for a batch matters
_MEMORY_POINTS = 12  # reports that a slope needs


class MachineGuards:
    """What speed and memory of this process say; none of it is kept in a checkpoint.

    Args:
      steps: of the whole run.
      alarm: called with name, step and message.
    """

    def __init__(self, steps: int, alarm: Callable[[str, int, str], None]):
        self._steps, self._alarm = steps, alarm
        self._speeds: collections.deque[float] = collections.deque(maxlen=101)
        self._slow = self._waiting = 0
        self._slow_seconds = self._waiting_seconds = 0.0
        self._memory: dict[str, collections.deque] = collections.defaultdict(lambda: collections.deque(maxlen=200))
        self._programs: int | None = None

    def check_programs(self, step: int, programs: int | None) -> None:
        """Stops the run if the train step was compiled again.

        Raises:
          TrainingError: it was.
        """
        if programs is None or step < 2:
            return
        if self._programs is None:
            self._programs = programs
        elif programs > self._programs:
            raise TrainingError(
                f"step {step}, guard recompilation: the train step was compiled again after step 2 ({programs} "
                "versions). A shape, dtype or sharding of the batch changes between steps; each costs a compilation",
                guard="recompilation",
                step=step,
                save=True,
            )

    def check_speed(self, step: int, tokens_per_second: float, seconds: float) -> None:
        """Raises the alarm `throughput` if several intervals in a row were slow."""
        usual = statistics.median(self._speeds) if len(self._speeds) >= _IN_A_ROW else None
        slow = usual is not None and tokens_per_second < usual / 2
        self._slow = self._slow + 1 if slow else 0
        self._slow_seconds = self._slow_seconds + seconds if slow else 0.0
        if self._slow >= _IN_A_ROW and self._slow_seconds >= _SLOW_FOR:
            message = (
                f"{tokens_per_second:,.0f} tokens/s, {_IN_A_ROW} intervals in a row under half the usual {usual:,.0f}"
            )
            self._alarm("throughput", step, f"{message}; look for another process, throttling, or slow data")
        self._speeds.append(tokens_per_second)

    def check_waits(self, step: int, seconds: float, waits: int, idle: float) -> None:
        """Raises the alarm `data_wait` if the device had nothing to do for much of several intervals.

        Args:
          step: last step of the interval.
          seconds: of the interval.
          waits: batches that the loop waited for.
          idle: seconds of these waits for which the device had nothing to do.
        """
        share = idle / max(seconds, 1e-9)
        waiting = share > 0.2 and idle > _SHORT_WAIT * max(waits, 1)
        self._waiting = self._waiting + 1 if waiting else 0
        self._waiting_seconds = self._waiting_seconds + seconds if waiting else 0.0
        if self._waiting >= _IN_A_ROW and self._waiting_seconds >= _SLOW_FOR:
            fix = "more config.data.num_workers (of a stream: hf_streaming=False), a faster disk"
            self._alarm("data_wait", step, f"{share:.0%} of the time is spent waiting for data; {fix}")

    def check_memory(self, step: int, name: str, used: int, limit: int) -> None:
        """Raises the alarm `memory_slope` if memory grows so that it will not last for the run."""
        points = self._memory[name]
        points.append((step, used))
        if len(points) < _MEMORY_POINTS + 3 or not limit:
            return
        steps, values = np.array(list(points)[3:], float).T  # the first reports are of the warm-up
        if steps[-1] == steps[0] or values.std() == 0:
            return
        slope = np.polyfit(steps, values, 1)[0]
        growth = slope * (steps[-1] - steps[0])
        steady = np.corrcoef(steps, values)[0, 1] > 0.9
        end = used + slope * (self._steps - step)
        if steady and growth > 0.02 * limit and end > limit:
            message = (
                f"{name} memory grows by {slope * 1000 / 2**20:,.0f} MiB per 1,000 steps, is {used / 2**30:.2f} GiB "
                f"and will pass {limit / 2**30:.2f} GiB before the run ends: something is kept that should not be"
            )
            self._alarm("memory_slope", step, message)
