"""Sample Factory's asynchronous PPO on Gymnasium CartPole-v1, and on Atari Pong.

    python -m benchmarks.peers.sample_factory_appo --env CartPole-v1 --actors 2 --num-envs 40
    python -m benchmarks.peers.sample_factory_appo --env atari_pong --actors 2 --num-envs 8

Options are those of Sample Factory's own examples for the two, with as many rollout workers as
there are cores and, for CartPole, the network that is the same for everybody. It runs in its usual
processes (rollout, inference, learner; each pins torch to one thread); steps are counted as its
learner learns from them. On Pong every sample is learned from in 4 epochs, each of 4 minibatches of
256, as in its example. Speeds are those of agent steps; a Pong step is four emulator frames.
"""

import sys
import tempfile
import time
from typing import Any

import gymnasium
import numpy as np
import torch
from sample_factory.algo.runners.runner_parallel import ParallelRunner
from sample_factory.algo.utils.action_distributions import argmax_actions
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.model.actor_critic import create_actor_critic
from sample_factory.model.model_utils import get_rnn_size
from sample_factory.utils.utils import log
from sf_examples.atari.atari_params import atari_override_defaults
from sf_examples.atari.atari_utils import make_atari_env

from benchmarks import protocol as p


class Watched(ParallelRunner):
    """Sample Factory's runner, which notes its progress and, if asked, evaluates on the clock."""

    def __init__(self, cfg: Any, job: p.Job) -> None:
        super().__init__(cfg)
        self.job = job
        self.progress: list[tuple[float, int]] = []
        self.mean = 0.0
        self.frames_per_step = cfg.env_frameskip if cfg.summaries_use_frameskip else 1
        self._weights: Any = None
        self._model: Any = None
        self._evaluated = 0.0

    def connect_components(self) -> None:
        super().connect_components()
        self.learners[0].model_initialized.connect(self.keep_model)

    def keep_model(self, initial: Any) -> None:
        """The learner's weights, in memory that it shares."""
        _, self._weights, device, _ = initial
        self._model = create_actor_critic(
            self.cfg, self.env_info.obs_space, self.env_info.action_space
        )
        self._model.model_to_device(device)
        self._model.eval()
        self.progress.append((time.perf_counter(), 0))

    def _after_training_iteration(self, training_iteration_since_resume: int) -> None:
        now = time.perf_counter()
        steps = self.env_steps.get(0, 0) // self.frames_per_step
        self.progress.append((now, steps))
        if self.job.mode == "threshold" and now - self._evaluated >= p.EVALUATE_SECONDS:
            self._model.load_state_dict(self._weights)
            self.mean = p.evaluate(self.greedy, self.job.seed)
            self._evaluated = time.perf_counter()
            self.progress.append((self._evaluated, steps))
        super()._after_training_iteration(training_iteration_since_resume)

    def _should_end_training(self) -> bool:
        return self.mean >= p.THRESHOLD or super()._should_end_training()

    def greedy(self, observation: np.ndarray) -> Any:
        with torch.no_grad():
            seen = self._model.normalize_obs({"obs": torch.as_tensor(observation)})
            memory = torch.zeros((len(observation), get_rnn_size(self.cfg)))
            self._model(seen, memory)
            return np.asarray(argmax_actions(self._model.action_distribution())).reshape(-1)


def make_cartpole(name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> Any:
    return gymnasium.make(name, render_mode=render_mode)


def make_pong(name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> Any:
    """Its own wrappers; ale-py knows Gymnasium 0.29 no more unless told to register there."""
    from ale_py.registration import register_v0_v4_envs

    register_v0_v4_envs()
    return make_atari_env(name, cfg, env_config, render_mode)


def cartpole_arguments(job: p.Job) -> list[str]:
    return [
        "--use_rnn=False",
        "--recurrence=1",
        "--with_vtrace=False",
        "--batch_size=512",
        "--reward_scale=0.1",
        "--encoder_mlp_layers",
        *map(str, p.HIDDEN),
        "--nonlinearity=tanh",
        f"--num_envs_per_worker={job.envs // job.actors}",
        "--policy_workers_per_policy=1",
    ]


def atari_arguments(job: p.Job) -> list[str]:
    envs = job.envs // job.actors
    # an even number of environments can be stepped in two halves, one while the other is served
    splits = 2 if envs % 2 == 0 else 1
    return ["--async_rl=True", f"--num_envs_per_worker={envs}", f"--worker_num_splits={splits}"]


def configure(job: p.Job, folder: str) -> Any:
    atari = job.env.startswith("atari")
    steps = job.steps * (p.FRAMES_PER_STEP if atari else 1)
    arguments = [
        "--algo=APPO",
        f"--env={job.env}",
        "--device=cpu",
        f"--num_workers={job.actors}",
        f"--seed={job.seed}",
        f"--train_for_env_steps={steps + steps // 8}",
        "--save_every_sec=1000000",
        "--experiment_summaries_interval=10",
        f"--train_dir={folder}",
        "--experiment=run",
        *(atari_arguments(job) if atari else cartpole_arguments(job)),
    ]
    parser, partial = parse_sf_args(argv=arguments)
    if atari:
        atari_override_defaults(partial.env, parser)
    register_env(job.env, make_pong if atari else make_cartpole)
    return parse_full_cfg(parser, arguments)


def main() -> None:
    job = p.parse_job()
    log.setLevel("ERROR")
    with tempfile.TemporaryDirectory() as folder:
        runner = Watched(configure(job, folder), job)
        runner.init()
        runner.run()
    began, _ = runner.progress[0]
    ended, steps = runner.progress[-1]
    if job.mode == "threshold":
        seconds = ended - began
        p.answer(job, steps, seconds, **p.reached(runner.mean, steps, seconds))
        return
    warm = next(row for row in runner.progress if row[1] >= steps / 8)
    p.answer(job, steps - warm[1], ended - warm[0])


if __name__ == "__main__":
    sys.exit(main())
