"""PPO (Schulman et al. 2017) whose agent remembers with Transformer-XL, in GTrXL's form (Parisotto et al. 2019).

    python examples/agent/ppo.py                                                a T-maze that only memory can solve
    python examples/agent/ppo.py --backbone lstm                                the same with an LSTM
    python examples/agent/ppo.py --env MiniGrid-MemoryS7-v0 --steps 500_000     a task of MiniGrid
    python examples/agent/ppo.py --env popgym:popgym-RepeatPreviousEasy-v0      one of POPGym

Many environments run side by side, one a row. Every row has its own memory, which is emptied where an episode begins.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
import tmaze
import torch
import tyro
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import FlattenObservation, TransformAction
from jaxtyping import Bool, Float, Int, Shaped
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.tensorboard import SummaryWriter

from transformer_xl import Lengths, Memory, TransformerXLBackbone, TransformerXLConfig
from transformer_xl.mistake import Mistake
from transformer_xl.model.baselines.recurrent import LSTM
from transformer_xl.runtime.files import write_whole

DISCOUNT, LAMBDA = 0.99, 0.95
LR, EPOCHS, PARTS = 1e-3, 3, 4
"""Each rollout is read EPOCHS times, in PARTS groups of rows, with a learning rate that falls to 0."""
CLIP, ENTROPY, VALUE, LARGEST_NORM = 0.2, 0.01, 0.5, 0.5
"""The range of the ratio of probabilities, the weights of the entropy and of the value's loss, the gradient's norm."""
WIDTH, LSTM_WIDTH = 64, 144
"""With them the LSTM has as many weights as the Transformer-XL."""
CATEGORIES = 11
"""A number in a picture of MiniGrid is the kind, the colour or the state of a cell: below 11."""
HELD_OUT, EPISODES = 1_000_000_000, 200
"""The seed of the episodes that score an agent, and their number; training uses smaller seeds."""


@dataclass(frozen=True)
class Options:
    """Train an agent with a memory, score it on other seeds, and draw one episode."""

    env: str = "TMaze-v0"
    """A task with numbered actions of Gymnasium, MiniGrid or POPGym; MODULE:NAME imports MODULE first."""
    corridor: int = 50
    """Smallest number of steps from the cue to the junction of the T-maze."""
    backbone: Literal["transformer-xl", "lstm"] = "transformer-xl"
    mem_len: int = 64
    """Number of steps that a layer of Transformer-XL looks back; 0: no memory."""
    steps: int = 300_000
    """Steps of all environments together, resumed ones included."""
    rows: int = 64
    """Number of environments side by side."""
    segment: int = 128
    """Steps of each environment between two updates."""
    seed: int = 1
    out: Path = Path("runs/agent")
    """Folder of the checkpoint, the files of TensorBoard and the picture."""
    resume: bool = False
    """Go on from the checkpoint in --out."""
    longer: bool = False
    """Also double the corridor of the T-maze until the agent fails, at most to 32 times, with a memory that grows."""


class Policy(nn.Module):
    """From observations and a memory to logits of actions, and values."""

    def __init__(self, space: gymnasium.Space, actions: int, options: Options):
        super().__init__()
        self.lengths = lengths(options.segment, options.mem_len)
        numbers = int(np.prod(space.shape or ()))
        pictured = space.dtype == np.uint8
        self.first = nn.EmbeddingBag(numbers * CATEGORIES, WIDTH, mode="sum") if pictured else nn.Linear(numbers, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.backbone = make_backbone(options)
        self.actor, self.critic = nn.Linear(WIDTH, actions), nn.Linear(WIDTH, 1)
        nn.init.normal_(self.actor.weight, std=0.01)
        if pictured:
            nn.init.normal_(self.first.weight, std=numbers**-0.5)

    def forward(
        self,
        observations: Shaped[Tensor, "B T ..."],
        memory: Any,
        lengths: Lengths | None = None,
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T A"], Float[Tensor, "B T"], Any]:
        flat = observations.flatten(2).to(self.second.weight.dtype)
        if isinstance(self.first, nn.EmbeddingBag):  # one row of its table for each value of each number
            flat = flat.long() + CATEGORIES * torch.arange(flat.shape[2])
        x = self.second(self.first(flat.flatten(0, 1)).relu()).unflatten(0, flat.shape[:2])
        outputs, memory = self.backbone(x, memory, lengths or self.lengths, starts)
        return self.actor(outputs[-1]), self.critic(outputs[-1])[..., 0], memory


def lengths(segment: int, mem_len: int, clamp_len: int | None = None) -> Lengths:
    """A query sees `mem_len` steps back. Then one step at a time gives the same as a segment at once."""
    return Lengths(tgt_len=segment, mem_len=mem_len, attn_len=mem_len + 1, clamp_len=clamp_len or mem_len or None)


def make_backbone(options: Options) -> nn.Module:
    """Two layers of GTrXL, or of an LSTM with as many weights."""
    if options.backbone == "lstm":
        if not options.mem_len:
            raise Mistake("--mem-len must be at least 1 with --backbone lstm, whose memory is its state. Leave it out.")
        return LSTM(TransformerXLConfig(vocab_size=0, kind="lstm", n_layer=2, d_model=WIDTH, d_inner=LSTM_WIDTH))
    size = {"n_layer": 2, "d_model": WIDTH, "n_head": 2, "d_head": WIDTH // 2, "d_inner": 2 * WIDTH}
    form = {"pre_lnorm": True, "final_norm": True, "relu_output": True, "gate": "gru", "init_std": WIDTH**-0.5}
    return TransformerXLBackbone(TransformerXLConfig(vocab_size=0, **size, **form))


def make_environments(options: Options, rows: int, render_mode: str | None = None) -> VectorEnv:
    """Environments that begin the next episode in the step after the end of one (Gymnasium's NEXT_STEP)."""
    given: dict[str, Any] = {"num_envs": rows} | ({"render_mode": render_mode} if render_mode else {})
    if options.env == "TMaze-v0":
        return gymnasium.make_vec(options.env, corridor=options.corridor, **given)
    wrappers: list[Any] = [FlattenObservation]
    if pictured := options.env.split(":")[-1].startswith("MiniGrid"):
        from minigrid.wrappers import ImgObsWrapper

        wrappers = [ImgObsWrapper]
        if "Memory" in options.env:  # turn left, turn right, go forward; the other actions change nothing here
            wrappers.append(lambda env: TransformAction(env, lambda action: action, Discrete(3)))
    given |= {"vectorization_mode": "sync", "wrappers": wrappers, "disable_env_checker": True}
    try:
        environments = gymnasium.make_vec(options.env, **given)
    except (gymnasium.error.Error, ImportError) as error:
        raise Mistake(f"--env must be a task that is installed, got {options.env}: {error}") from error
    space, actions = environments.single_observation_space, environments.single_action_space
    if not isinstance(space, Box) or not isinstance(actions, Discrete) or (space.dtype == np.uint8) != pictured:
        seen = f"{options.env} has {space} and {actions}"
        raise Mistake(f"--env must have numbered actions, and pictures only if it is of MiniGrid; {seen}.")
    return environments


class Rollout(NamedTuple):
    """Consecutive steps of all rows."""

    observations: Shaped[Tensor, "B T ..."]
    starts: Bool[Tensor, "B T"]
    """An episode begins with this observation: the memory is emptied before it."""
    ignored: Bool[Tensor, "B T"]
    """The observation is the last of an episode, and the environment ignores the action."""
    actions: Int[Tensor, "B T"]
    log_probs: Float[Tensor, "B T"]
    values: Float[Tensor, "B T"]
    rewards: Float[Tensor, "B T"]
    terminated: Bool[Tensor, "B T"]
    done: Bool[Tensor, "B T"]
    """The episode ended with this action, at its end or at the limit of steps."""
    memory: Memory
    """The memory before the first step."""

    def select(self, rows: Int[Tensor, " R"]) -> Rollout:
        *tensors, memory = self
        return Rollout(*(each[rows] for each in tensors), memory.select(rows))


class State(NamedTuple):
    """Where the environments are between two rollouts."""

    observation: Shaped[Tensor, "B ..."]
    starts: Bool[Tensor, " B"]
    ignored: Bool[Tensor, " B"]
    memory: Memory


def first_state(policy: Policy, environments: VectorEnv, seed: int) -> State:
    observation, _ = environments.reset(seed=seed)
    starts = torch.ones(len(observation), dtype=torch.bool)
    memory = policy.backbone.empty_memory(len(observation), policy.lengths)
    return State(torch.from_numpy(observation.copy()), starts, ~starts, memory)


@torch.no_grad()
def collect(policy: Policy, environments: VectorEnv, state: State, steps: int) -> tuple[Rollout, Tensor, State]:
    """A rollout of `steps` steps, the values after its last step, and the state after it."""
    observation, starts, ignored, memory = state
    begin, taken = memory, []
    for _ in range(steps):
        logits, values, memory = policy(observation[:, None], memory.reset(starts))
        choice = Categorical(logits=logits[:, 0])
        action = choice.sample()
        seen, reward, *ends, _ = environments.step(action.numpy())
        terminated, truncated = map(torch.from_numpy, ends)
        done, reward = terminated | truncated, torch.from_numpy(reward).to(values.dtype)
        before = (observation, starts, ignored, action, choice.log_prob(action), values[:, 0])
        taken.append((*before, reward, terminated, done))
        observation, starts, ignored = torch.from_numpy(seen.copy()), ignored, done
    _, after, _ = policy(observation[:, None], memory.reset(starts))
    columns = (torch.stack(each, dim=1) for each in zip(*taken, strict=True))
    return Rollout(*columns, begin), after[:, 0], State(observation, starts, ignored, memory)


def advantages(rollout: Rollout, after: Float[Tensor, " B"]) -> Float[Tensor, "B T"]:
    """Generalised advantages (Schulman et al. 2016). `after`: the values after the last step.

    An episode cut by its limit of steps goes on for the value, because the environment shows its last observation.
    """
    following = torch.cat([rollout.values[:, 1:], after[:, None]], dim=1)
    surprise = rollout.rewards + DISCOUNT * following * ~rollout.terminated - rollout.values
    result, later = torch.empty_like(surprise), torch.zeros_like(after)
    for step in reversed(range(surprise.shape[1])):
        later = surprise[:, step] + DISCOUNT * LAMBDA * later * ~rollout.done[:, step]
        result[:, step] = later
    return result


def replay(policy: Policy, rollout: Rollout) -> tuple[Float[Tensor, "B T A"], Float[Tensor, "B T"]]:
    """The logits and values of a rollout's steps, with gradients: one call, in which episodes begin inside the rows."""
    logits, values, _ = policy(rollout.observations, rollout.memory, starts=rollout.starts)
    return logits, values


def losses(policy: Policy, rollout: Rollout, advantage: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Means over the steps whose action counted: the policy's and the value's loss, the entropy, the divergence."""
    logits, values = replay(policy, rollout)
    choice = Categorical(logits=logits)
    log_ratio = choice.log_prob(rollout.actions) - rollout.log_probs
    ratio = log_ratio.exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    terms = {"policy": -gain, "value": (values - target).square()}
    terms |= {"entropy": choice.entropy(), "divergence": ratio - 1 - log_ratio}
    return {name: term[~rollout.ignored].mean() for name, term in terms.items()}


def update(policy: Policy, optimizer: torch.optim.Optimizer, rollout: Rollout, after: Tensor) -> dict[str, float]:
    """Train on one rollout; the means of the losses."""
    advantage = advantages(rollout, after)
    target = advantage + rollout.values
    counted = advantage[~rollout.ignored]
    advantage = (advantage - counted.mean()) / (counted.std() + 1e-8)
    report: dict[str, list[float]] = {}
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(advantage)).chunk(PARTS):
            terms = losses(policy, rollout.select(rows), advantage[rows], target[rows])
            loss = terms["policy"] + VALUE * terms["value"] - ENTROPY * terms["entropy"]
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), LARGEST_NORM)
            optimizer.step()
            for name, term in terms.items():
                report.setdefault(name, []).append(term.item())
    return {name: float(np.mean(values)) for name, values in report.items()}


@torch.no_grad()
def score(
    policy: Policy, environments: VectorEnv, lengths: Lengths, pictures: list[Any] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The return of one held-out episode of each row, and whether it succeeded: whether its last reward was positive.

    The agent takes the likeliest action. `pictures` receives those of the first row, with the one after the end.
    """
    observation, _ = environments.reset(seed=HELD_OUT)
    running = np.ones(environments.num_envs, bool)
    returns, success = np.zeros(len(running)), np.zeros(len(running), bool)
    memory = policy.backbone.cached(policy.backbone.empty_memory(len(running), lengths), lengths)
    while running.any():
        if pictures is not None:
            pictures.append(environments.render()[0])
        logits, _, memory = policy(torch.from_numpy(observation.copy())[:, None], memory, lengths)
        observation, reward, terminated, truncated, _ = environments.step(logits[:, 0].argmax(-1).numpy())
        returns += reward * running
        success |= running & terminated & (reward > 0)
        running &= ~(terminated | truncated)
    if pictures is not None:
        pictures.append(environments.render()[0])
    return returns, success


def save_checkpoint(policy: Policy, optimizer: torch.optim.Optimizer, done: int, options: Options) -> None:
    """Write weights, moments of the optimizer and number of steps in one file, whole or not at all."""
    tensors = {f"policy.{name}": weight for name, weight in policy.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
    texts = {"steps": str(done), "options": json.dumps(asdict(options), default=str)}
    write_whole(options.out / "checkpoint.safetensors", save(tensors, texts))


def load_checkpoint(policy: Policy, optimizer: torch.optim.Optimizer, options: Options) -> int:
    """Set weights and moments; the number of steps that were trained."""
    path = options.out / "checkpoint.safetensors"
    if not path.is_file():
        raise Mistake(f"--resume needs a checkpoint, and {path} does not exist. Leave --resume out, or change --out.")
    with safe_open(path, "pt") as file:
        names, texts = file.keys(), file.metadata()
        tensors = {name: file.get_tensor(name) for name in names}
    for name, before in json.loads(texts["options"]).items():
        now = getattr(options, name)
        if name in ("env", "backbone", "mem_len") and now != before:
            raise Mistake(f"--{name.replace('_', '-')} must be {before} as in the checkpoint, got {now}.")
    policy.load_state_dict({name[7:]: tensor for name, tensor in tensors.items() if name.startswith("policy.")})
    moments: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, moment = name.split(".")
            moments.setdefault(int(index), {})[moment] = tensor
    optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
    return int(texts["steps"])


def train(options: Options, writer: SummaryWriter) -> Policy:
    """Train until `options.steps`, from a checkpoint with `options.resume`."""
    torch.manual_seed(options.seed)
    environments = make_environments(options, options.rows)
    policy = Policy(environments.single_observation_space, int(environments.single_action_space.n), options)
    optimizer = torch.optim.Adam(policy.parameters(), lr=LR, eps=1e-5)
    done = first = load_checkpoint(policy, optimizer, options) if options.resume else 0
    state = first_state(policy, environments, options.seed * 1_000_000 + done)
    began, batch = time.perf_counter(), options.rows * options.segment
    while done < options.steps:
        optimizer.param_groups[0]["lr"] = LR * (1 - done / options.steps)
        rollout, after, state = collect(policy, environments, state, options.segment)
        report = update(policy, optimizer, rollout, after)
        done += batch
        episodes = max(int(rollout.done.sum()), 1)
        report["reward per episode"] = float(rollout.rewards.sum()) / episodes
        report["success"] = int((rollout.terminated & (rollout.rewards > 0)).sum()) / episodes
        report["steps per second"] = (done - first) / (time.perf_counter() - began)
        for name, value in report.items():
            writer.add_scalar(name, value, done)
        if done // batch % 10 == 0 or done >= options.steps:
            save_checkpoint(policy, optimizer, done, options)
            shown = ("reward per episode", "success", "entropy", "steps per second")
            print(f"{done:>9,} steps", *(f"{name} {report[name]:.4g}" for name in shown), sep="   ", flush=True)
    return policy


def draw(policy: Policy, options: Options) -> None:
    """Write one held-out episode as a GIF, if the environment can draw itself."""
    if "rgb_array" not in make_environments(options, 1).metadata["render_modes"]:
        return
    pictures: list[np.ndarray] = []
    score(policy, make_environments(options, 1, "rgb_array"), policy.lengths, pictures)
    first, *others = map(Image.fromarray, pictures)
    first.save(options.out / "episode.gif", save_all=True, append_images=others, duration=80, loop=0)
    print(f"{options.out}/episode.gif shows one episode")


def report_score(policy: Policy, options: Options, episodes: int) -> float:
    """Print the score of held-out episodes; the share of them that succeeded."""
    environments = make_environments(options, episodes)
    # A longer memory encodes greater distances as the greatest one of training.
    returns, success = score(policy, environments, lengths(1, options.mem_len, policy.lengths.clamp_len))
    error = returns.std(ddof=1) / episodes**0.5
    where = f", corridor {options.corridor}" if options.env == "TMaze-v0" else ""
    shown = f"success {success.mean():.3f}, return {returns.mean():.3f} ± {error:.3f}"
    print(f"{episodes} held-out episodes{where}: {shown}", flush=True)
    return float(success.mean())


def check(options: Options) -> None:
    """Raise a `Mistake` for options that do not fit."""
    if options.rows < 1 or options.segment < 2 or options.mem_len < 0:
        got = f"{options.rows}, {options.segment} and {options.mem_len}"
        raise Mistake(f"--rows, --segment and --mem-len must be at least 1, 2 and 0, got {got}.")
    if options.rows * options.segment < 4 or options.corridor < 1 or options.steps < 0:
        got = f"{options.rows * options.segment}, {options.corridor} and {options.steps}"
        raise Mistake(f"--rows times --segment, --corridor and --steps must be at least 4, 1 and 0, got {got}.")
    if not 0 <= options.seed < 1000:
        raise Mistake(f"--seed must be from 0 to 999, so that no episode is a held-out one, got {options.seed}.")
    if options.env != "TMaze-v0" and (options.longer or options.corridor != Options.corridor):
        raise Mistake(f"--corridor and --longer are for the TMaze-v0, got --env {options.env}. Leave them out.")
    if options.out.is_file():
        raise Mistake(f"--out must be a folder, and {options.out} is a file. Choose another.")
    if not options.resume and (options.out / "checkpoint.safetensors").exists():
        raise Mistake(f"--out must be a new folder, and {options.out} has a checkpoint. Give --resume, or another.")


def main(options: Options) -> None:
    check(options)
    began = time.perf_counter()
    with SummaryWriter(str(options.out)) as writer:
        policy = train(options, writer)
        writer.add_scalar("held-out success", report_score(policy, options, EPISODES), options.steps)
    draw(policy, options)
    print(f"{time.perf_counter() - began:.0f} seconds", flush=True)
    for factor in (2, 4, 8, 16, 32) if options.longer and options.env == "TMaze-v0" else ():
        corridor = factor * options.corridor
        longer = replace(options, corridor=corridor, mem_len=corridor + 2 * tmaze.SLACK if options.mem_len else 0)
        if report_score(policy, longer, EPISODES // 4) < 0.95:
            break


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except Mistake as mistake:
        print(f"ppo.py: {mistake}", file=sys.stderr)
        sys.exit(2)
