"""stable-baselines3's PPO on Gymnasium CartPole-v1.

    python -m benchmarks.peers.sb3_ppo --num-envs 8 --total-steps 50000 --threads 1

Training to the threshold is watched by a callback; its evaluations stop the clock.
"""

import time
from typing import Any

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

from benchmarks import protocol as p


class Watch(BaseCallback):
    """Evaluates every so often outside the clock, and stops at the threshold."""

    def __init__(self, job: p.Job) -> None:
        super().__init__()
        self.job = job
        self.seconds = 0.0
        self.mean = 0.0
        self._chunk = max(1, p.EVALUATE_EVERY // job.per_iteration)
        self._iterations = 0
        self._since = 0.0

    def _on_rollout_start(self) -> None:
        # called before every rollout: the update of the one before has just ended
        now = time.perf_counter()
        if self._iterations:
            self.seconds += now - self._since
        if self._iterations and self._iterations % self._chunk == 0:
            self.mean = p.evaluate(
                lambda x: self.model.predict(x, deterministic=True)[0], self.job.seed
            )
        self._iterations += 1
        self._since = time.perf_counter()

    def _greedy(self, observation: Any) -> Any:
        return self.model.predict(observation, deterministic=True)[0]

    def _on_step(self) -> bool:
        return self.mean < p.THRESHOLD


def main() -> None:
    job = p.parse_job()
    torch.set_num_threads(job.threads)
    model = PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=job.envs, seed=job.seed),
        learning_rate=p.LEARNING_RATE,
        n_steps=p.UNROLL,
        batch_size=job.per_iteration // p.MINIBATCHES,
        n_epochs=p.EPOCHS,
        gamma=p.DISCOUNT,
        gae_lambda=p.LAMBDA,
        clip_range=p.CLIP,
        ent_coef=p.ENTROPY_COEFFICIENT,
        vf_coef=p.VALUE_COEFFICIENT,
        max_grad_norm=p.MAX_GRAD_NORM,
        policy_kwargs={"net_arch": {"pi": list(p.HIDDEN), "vf": list(p.HIDDEN)}},
        seed=job.seed,
        device="cpu",
    )
    if job.mode == "speed":

        def iterate(count: int) -> None:
            model.learn(count * job.per_iteration, reset_num_timesteps=False)

        p.train_and_answer(job, iterate, lambda x: model.predict(x, deterministic=True)[0])
        return
    watch = Watch(job)
    model.learn(job.iterations * job.per_iteration, callback=watch)
    solved = watch.mean >= p.THRESHOLD
    # the step in which training is told to stop does not count
    steps = model.num_timesteps - (job.envs if solved else 0)
    p.answer(job, steps, watch.seconds, **p.reached(watch.mean, steps, watch.seconds))


if __name__ == "__main__":
    main()
