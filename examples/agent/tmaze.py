"""A T-maze for Gymnasium that only memory can solve (Bakker 2001, Reinforcement Learning with Long Short-Term Memory).

                      | the arm above: the goal if the cue was 1
    cue -- ... ------ junction
                      | the arm below: the goal if the cue was -1

The agent sees the cue in the first cell only. Its position changes only when it moves forward, so it cannot store the
cue there, and all cells between look the same. The distance from the cue to the junction is drawn for each episode.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

FORWARD, UP, DOWN = range(3)
SLACK = 10
"""The distance to the junction is at least `corridor` and less than `corridor + SLACK`."""
STANDING_STILL = -0.05
"""Reward of a step that changes nothing."""
CELL = 8
"""Width of a cell in a picture, in pixels."""


class TMazes(VectorEnv):
    """Many T-mazes at once, in numpy.

    An observation is (the cue or 0, whether walls are on both sides, whether this is the junction). The reward is 1 for
    the right arm, 0 for the other one or a step forward, and `STANDING_STILL` otherwise. Any arm ends the episode; so
    do four times as many steps as the longest corridor has. After the end of an episode the next step begins another
    one and ignores its action.
    """

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(self, num_envs: int = 1, corridor: int = 50, render_mode: str | None = None):
        self.num_envs, self.corridor, self.render_mode = num_envs, corridor, render_mode
        self.single_observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.single_action_space = spaces.Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.cue, self.length, self.position, self.steps = np.zeros((4, num_envs), int)
        self.turned = np.zeros(num_envs, int)
        """The arm that the agent is in: 1 above, -1 below, 0 none."""
        self.ended = np.ones(num_envs, bool)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.begin(np.ones(self.num_envs, bool))
        return self.observe(), {}

    def begin(self, rows: np.ndarray) -> None:
        """Begin an episode in the marked rows. All rows draw, so that a row's episodes depend on no other row."""
        cue = self.np_random.choice([-1, 1], self.num_envs)
        length = self.corridor + self.np_random.integers(SLACK, size=self.num_envs)
        self.cue[rows], self.length[rows] = cue[rows], length[rows]
        for count in (self.position, self.steps, self.turned, self.ended):
            count[rows] = 0

    def observe(self) -> np.ndarray:
        junction = self.position == self.length
        return np.stack([self.cue * (self.position == 0), ~junction, junction], 1, dtype=np.float32, casting="unsafe")

    def step(self, actions: np.ndarray):
        begun, junction = self.ended, self.position == self.length
        turned = junction & (actions != FORWARD) & ~begun
        moved = ~junction & (actions == FORWARD) & ~begun
        self.turned[turned] = np.where(actions == UP, 1, -1)[turned]
        self.position += moved
        self.steps += 1
        reward = np.where(turned, self.turned == self.cue, np.where(moved | begun, 0.0, STANDING_STILL))
        truncated = ~turned & ~begun & (self.steps >= 4 * (self.corridor + SLACK))
        self.ended = turned | truncated
        self.begin(begun)
        return self.observe(), reward, turned, truncated, {}

    def render(self) -> tuple[np.ndarray, ...]:
        """A picture of each maze, from the cue (green above, blue below) to the arms, with the agent in red."""
        shape = (7, self.corridor + SLACK + 2, 3)
        pictures = []
        for cue, length, position, turned in zip(self.cue, self.length, self.position, self.turned, strict=True):
            picture = np.full(shape, 40, np.uint8)
            picture[3, 1 : length + 2] = picture[1:6, length + 1] = 230
            picture[3 - cue, 1] = picture[3 - 2 * cue, length + 1] = (0, 170, 80) if cue > 0 else (60, 110, 255)
            picture[3 - 2 * turned, position + 1] = (220, 30, 30)
            pictures.append(picture.repeat(CELL, 0).repeat(CELL, 1))
        return tuple(pictures)


class TMaze(gymnasium.Env):
    """One T-maze."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(self, corridor: int = 50, render_mode: str | None = None):
        self.mazes, self.render_mode = TMazes(1, corridor), render_mode
        self.observation_space = self.mazes.single_observation_space
        self.action_space = self.mazes.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        observation, _ = self.mazes.reset(seed=seed)
        return observation[0], {}

    def step(self, action: int):
        observation, reward, terminated, truncated, _ = self.mazes.step(np.array([action]))
        return observation[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}

    def render(self) -> np.ndarray:
        return self.mazes.render()[0]


gymnasium.register("TMaze-v0", entry_point=TMaze, vector_entry_point=TMazes)
