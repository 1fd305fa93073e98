"""The agent: its T-maze, its advantages, the memory that is replayed in training, and a whole small training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

gymnasium = pytest.importorskip("gymnasium")
import numpy as np  # noqa: E402
import torch  # noqa: E402
from gymnasium.utils.env_checker import check_env  # noqa: E402
from PIL import Image  # noqa: E402

pytestmark = [pytest.mark.outside]
AGENT = Path(__file__).parents[2] / "examples" / "agent"
sys.path.insert(0, str(AGENT))
import ppo  # noqa: E402
import tmaze  # noqa: E402

from transformer_xl.mistake import Mistake  # noqa: E402

ROUNDING = {"rtol": 0, "atol": 1e-12}
"""Double precision over two layers: the numbers are near 1 and each is a sum of at most some hundred products."""
MEMORIES: Any = ({"mem_len": 5}, {"mem_len": 31}, {"mem_len": 0}, {"backbone": "lstm"})
TINY = {"rows": 5, "segment": 17, "corridor": 3}


def rolled_out(
    rollouts: int = 3, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[ppo.Policy, ppo.Rollout, torch.Tensor]:
    """A fresh policy, the last of some consecutive rollouts in short mazes, and the values after it."""
    settings = ppo.Options(**(TINY | options))
    torch.manual_seed(3)
    environments = ppo.make_environments(settings, settings.rows)
    policy = ppo.Policy(environments.single_observation_space, 3, settings).to(dtype)
    torch.nn.init.normal_(policy.actor.weight, std=0.1)  # a fresh one hardly depends on the memory
    state = ppo.first_state(policy, environments, seed=1)
    for _ in range(rollouts):
        rollout, after, state = ppo.collect(policy, environments, state, settings.segment)
    return policy, rollout, after


def test_the_agents_lstm_is_as_large():
    sizes = [
        sum(weight.numel() for weight in ppo.make_backbone(ppo.Options(backbone=kind)).parameters())
        for kind in ("transformer-xl", "lstm")
    ]
    assert abs(sizes[0] / sizes[1] - 1) < 0.03, sizes


@pytest.mark.parametrize("memory", MEMORIES)
def test_the_replayed_memory_gives_the_log_probabilities_of_the_rollout(memory):
    policy, rollout, _ = rolled_out(**memory)
    starts, lstm = rollout.starts, "backbone" in memory
    assert starts[:, 1:].any() and (~starts[:, 0]).any(), "no episode starts in the middle, or none goes on"
    assert lstm or rollout.memory.length == memory["mem_len"]
    logits, values = ppo.replay(policy, rollout)
    log_probs = torch.distributions.Categorical(logits=logits).log_prob(rollout.actions)
    torch.testing.assert_close(log_probs, rollout.log_probs, **ROUNDING)
    torch.testing.assert_close(values, rollout.values, **ROUNDING)
    empty = policy.backbone.empty_memory(len(starts), policy.lengths)
    without, _ = ppo.replay(policy, rollout._replace(memory=empty))
    assert torch.allclose(without, logits) == (memory.get("mem_len") == 0), "the test does not see the memory"


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_row_depends_on_no_other(memory):
    policy, rollout, _ = rolled_out(**memory)
    before, _ = ppo.replay(policy, rollout)
    rows = torch.tensor([3, 1, 3])
    after, _ = ppo.replay(policy, rollout.select(rows))
    torch.testing.assert_close(after, before[rows], **ROUNDING)
    others = rollout.observations.clone()
    others[0], others[2:] = 1.0, -1.0
    starts = rollout.starts.clone()
    starts[0], starts[2:] = True, False
    after, _ = ppo.replay(policy, rollout._replace(observations=others, starts=starts))
    torch.testing.assert_close(after[1], before[1], **ROUNDING)


@pytest.mark.parametrize("memory", MEMORIES)
def test_an_episode_depends_on_no_earlier_one(memory):
    policy, rollout, _ = rolled_out(**memory)
    before, _ = ppo.replay(policy, rollout)
    row, step = next((row, step) for row, step in rollout.starts.nonzero().tolist() if step)
    others = rollout.observations.clone()
    others[row, :step] = 0.5
    after, _ = ppo.replay(policy, rollout._replace(observations=others))
    torch.testing.assert_close(after[row, step:], before[row, step:], **ROUNDING)
    assert not torch.allclose(after[row, :step], before[row, :step])


def advantage_by_definition(rollout: ppo.Rollout, after: torch.Tensor, row: int, step: int) -> float:
    """The sum over l of (discount * lambda)^l times the surprise l steps later, until the episode ends."""
    values = torch.cat([rollout.values, after[:, None]], dim=1)[row].tolist()
    total, factor = 0.0, 1.0
    for later in range(step, rollout.rewards.shape[1]):
        following = 0.0 if rollout.terminated[row, later] else values[later + 1]
        total += factor * (float(rollout.rewards[row, later]) + ppo.DISCOUNT * following - values[later])
        if rollout.done[row, later]:
            break
        factor *= ppo.DISCOUNT * ppo.LAMBDA
    return total


def test_advantages_are_those_of_the_definition():
    _, rollout, after = rolled_out()
    torch.manual_seed(5)
    done = torch.rand(rollout.done.shape) < 0.2
    rollout = rollout._replace(
        rewards=torch.randn(done.shape).double(), done=done, terminated=done & (torch.rand(done.shape) < 0.5)
    )
    assert (done & ~rollout.terminated).any() and rollout.terminated.any()
    found = ppo.advantages(rollout, after)
    expected = [[advantage_by_definition(rollout, after, *index) for index in np.ndindex(done.shape)]]
    torch.testing.assert_close(found.flatten(), torch.tensor(expected, dtype=torch.float64)[0], **ROUNDING)


def test_steps_whose_action_is_ignored_are_not_trained():
    policy, rollout, after = rolled_out()
    assert rollout.ignored.any()
    # The step after the end of an episode is ignored, and the one after it starts another.
    assert torch.equal(rollout.ignored[:, 1:], rollout.done[:, :-1])
    assert torch.equal(rollout.starts[:, 1:], rollout.ignored[:, :-1])
    advantage = ppo.advantages(rollout, after)
    terms = ppo.losses(policy, rollout, advantage, advantage + rollout.values)
    counted = (~rollout.ignored).nonzero().tolist()
    expected = sum(advantage[row, step] ** 2 for row, step in counted) / len(counted)
    torch.testing.assert_close(terms["value"], expected, **ROUNDING)
    expected = -sum(advantage[row, step] for row, step in counted) / len(counted)  # all ratios are 1
    torch.testing.assert_close(terms["policy"], expected, **ROUNDING)
    torch.testing.assert_close(terms["divergence"], torch.zeros(()).double(), **ROUNDING)
    other = rollout._replace(actions=torch.where(rollout.ignored, 2 - rollout.actions, rollout.actions))
    for name, term in ppo.losses(policy, other, advantage, advantage + rollout.values).items():
        assert torch.equal(term, terms[name])


def test_the_maze_is_an_environment_of_gymnasium():
    check_env(gymnasium.make("TMaze-v0", render_mode="rgb_array").unwrapped)


def walked(cue: int, actions: list[int], corridor: int = 7) -> list[tuple[Any, ...]]:
    """All that an agent sees of an episode with this cue."""
    environment = gymnasium.make("TMaze-v0", corridor=corridor).unwrapped
    for seed in range(99):
        first, _ = environment.reset(seed=seed)
        if first[0] == cue:
            environment.mazes.length[:] = corridor
            return [(first.tolist(),), *((seen.tolist(), *rest[:3]) for seen, *rest in map(environment.step, actions))]
    raise AssertionError("no such cue")


def test_only_the_first_observation_shows_the_cue():
    walk = [tmaze.FORWARD] * 3 + [tmaze.UP, tmaze.DOWN] + [tmaze.FORWARD] * 5
    above, below = walked(1, walk), walked(-1, walk)
    assert above[0] != below[0] and above[1:] == below[1:]
    assert above[-1] == ([0.0, 0.0, 1.0], tmaze.STANDING_STILL, False, False)
    assert [seen[1] for seen in above[1:]] == [0.0] * 3 + [tmaze.STANDING_STILL] * 2 + [0.0] * 4 + [
        tmaze.STANDING_STILL
    ]
    for cue, arm, reward in ((1, tmaze.UP, 1.0), (1, tmaze.DOWN, 0.0), (-1, tmaze.UP, 0.0), (-1, tmaze.DOWN, 1.0)):
        assert walked(cue, [*walk, arm])[-1] == ([0.0, 0.0, 1.0], reward, True, False)


def test_many_mazes_are_as_one_maze_in_gymnasiums_own_vector():
    both = [
        gymnasium.make_vec("TMaze-v0", 1, vectorization_mode=mode, corridor=3)
        for mode in ("vector_entry_point", "sync")
    ]
    for environments in both:
        environments.reset(seed=11)
    draw, ends = np.random.default_rng(1), np.zeros(2, int)
    for _ in range(400):
        action = draw.choice(3, 1, p=[0.8, 0.1, 0.1] if ends[0] < 9 else [0.02, 0.49, 0.49])
        ours, theirs = (environments.step(action)[:4] for environments in both)
        for mine, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(mine, other)
        ends += [ours[2][0], ours[3][0]]
    assert (ends > 3).all(), "too few episodes reached an arm, or too few the limit of steps"


def test_cues_and_distances_are_random():
    environments = gymnasium.make_vec("TMaze-v0", 500, corridor=50)
    environments.reset(seed=2)
    assert set(environments.length) == set(range(50, 50 + tmaze.SLACK))
    assert abs(environments.cue.mean()) < 0.15  # 3 standard deviations of the mean of 500 signs are 0.134


@pytest.mark.parametrize("name", ["TMaze-v0", "MiniGrid-MemoryS7-v0", "popgym:popgym-RepeatPreviousEasy-v0"])
def test_a_small_training_runs_and_resumes(name, tmp_path, capsys, monkeypatch):
    maze = name == "TMaze-v0"
    monkeypatch.setattr(ppo, "EPISODES", 8 if maze else 2)
    drawn = not name.startswith("popgym")
    pytest.importorskip("minigrid" if drawn else "popgym")
    sizes = {name: value for name, value in TINY.items() if maze or name != "corridor"}
    options = ppo.Options(env=name, out=tmp_path, **sizes, steps=170, mem_len=8, longer=maze)
    ppo.main(options)
    printed = capsys.readouterr().out
    assert "held-out episodes" in printed and ("corridor 6" in printed) == options.longer
    assert list(tmp_path.glob("events.out.tfevents.*"))
    assert (tmp_path / "episode.gif").exists() == drawn
    if drawn:
        with Image.open(tmp_path / "episode.gif") as picture:
            assert picture.n_frames > 1
    if not maze:
        return
    ppo.main(ppo.replace(options, steps=340, resume=True, longer=False))
    lines = [line for line in capsys.readouterr().out.splitlines() if "success" in line]
    assert lines[0].split()[0] == "340", lines
    with pytest.raises(Mistake, match="--out must be a new folder"):
        ppo.main(options)


def test_a_checkpoint_brings_back_weights_moments_and_steps(tmp_path):
    options = ppo.Options(out=tmp_path, **TINY)
    policy, rollout, after = rolled_out(dtype=torch.float32)
    optimizer = torch.optim.Adam(policy.parameters())
    ppo.update(policy, optimizer, rollout, after)
    ppo.save_checkpoint(policy, optimizer, 170, options)
    space = ppo.make_environments(options, 1).single_observation_space
    other = ppo.Policy(space, 3, options)
    others = torch.optim.Adam(other.parameters())
    assert ppo.load_checkpoint(other, others, options) == 170
    for mine, its in zip(policy.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)
        moments = others.state[its]
        assert moments.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(moments[name], value) for name, value in optimizer.state[mine].items())
    with pytest.raises(Mistake, match=r"--mem-len must be 64 as in the checkpoint, got 8"):
        ppo.load_checkpoint(other, others, ppo.replace(options, mem_len=8))
    with pytest.raises(Mistake, match=r"--resume needs a checkpoint"):
        ppo.load_checkpoint(other, others, ppo.replace(options, out=tmp_path / "nowhere"))


def test_mistakes_are_one_sentence():
    with pytest.raises(Mistake, match=r"--mem-len must be at least 1 with --backbone lstm"):
        ppo.make_backbone(ppo.Options(backbone="lstm", mem_len=0))
    with pytest.raises(Mistake, match=r"--env must have numbered actions"):
        ppo.make_environments(ppo.Options(env="Pendulum-v1"), 1)
    for options in (ppo.Options(env="CartPole-v1", longer=True), ppo.Options(rows=0), ppo.Options(mem_len=-1)):
        with pytest.raises(Mistake, match=r"--corridor and --longer are for|must be at least 1, 2 and 0, got"):
            ppo.main(options)
