"""RLlib's IMPALA on Gymnasium CartPole-v1, new API stack.

    python -m benchmarks.peers.rllib_impala --actors 2 --num-envs 2 --total-steps 20000

Options are those of RLlib's own tuned CartPole example (batch 500, rate 5e-4, value weight 0.05,
no entropy bonus, shared layers), but for the network, which is the same for everybody, and the
learner, which shares this process: two cores are better off without a process more. `--actors` are
its environment runners, each with its share of `--num-envs`; steps are counted as they are sampled.
"""

import os
import time
from typing import Any

os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import ray
import torch
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from benchmarks import protocol as p

FRAGMENT = 50
"""Steps that each environment takes for one message: RLlib's own choice."""
BATCH = 500


def configure(job: p.Job) -> IMPALAConfig:
    config = IMPALAConfig().environment("CartPole-v1").framework("torch")
    config.env_runners(
        num_env_runners=job.actors,
        num_envs_per_env_runner=job.envs // job.actors,
        rollout_fragment_length=FRAGMENT,
    )
    config.learners(num_learners=0)
    config.training(
        train_batch_size_per_learner=max(BATCH, FRAGMENT * job.envs),
        lr=0.0005,
        grad_clip=40.0,
        grad_clip_by="global_norm",
        vf_loss_coeff=0.05,
        entropy_coeff=0.0,
    )
    model = DefaultModelConfig(
        fcnet_hiddens=list(p.HIDDEN), fcnet_activation="tanh", vf_share_layers=True
    )
    config.rl_module(model_config=model)
    config.reporting(min_time_s_per_iteration=0.2, metrics_num_episodes_for_smoothing=100)
    return config.debugging(seed=job.seed, log_level="ERROR")


class Training:
    def __init__(self, job: p.Job) -> None:
        self.job = job
        self.algorithm = configure(job).build_algo()
        self.steps = 0
        self.result: dict[str, Any] = {}

    def iterate(self, count: int) -> int:
        """Trains until so many times `per_iteration` further steps were sampled."""
        before = self.steps
        while self.steps < before + count * self.job.per_iteration:
            self.result = self.algorithm.train()
            sampled = self.result["env_runners"].get("num_env_steps_sampled_lifetime", 0)
            self.steps = int(sampled)
        return self.steps - before

    def greedy(self, observation: Any) -> Any:
        module = self.algorithm.learner_group._learner.module[DEFAULT_MODULE_ID]
        with torch.no_grad():
            outputs = module.forward_inference({"obs": torch.as_tensor(observation)})
        return outputs["action_dist_inputs"].argmax(dim=-1).numpy()

    def trained(self) -> int:
        """Steps that were learned from so far."""
        learner = self.result["learners"][DEFAULT_MODULE_ID]
        return int(learner.get("num_module_steps_trained_lifetime", 0))


def measure_speed(training: Training) -> None:
    job = training.job
    training.iterate(max(1, job.iterations // 8))
    while not training.trained():  # nothing was learned yet
        training.iterate(1)
    began, learned = time.perf_counter(), training.trained()
    steps = training.iterate(job.iterations)
    seconds = time.perf_counter() - began
    p.answer(job, steps, seconds, trained_steps=training.trained() - learned)


def main() -> None:
    job = p.parse_job()
    torch.set_num_threads(job.threads)
    began = time.perf_counter()
    ray.init(
        num_cpus=job.actors + 1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        training = Training(job)
        if job.mode == "speed":
            measure_speed(training)
        else:
            p.train_on_the_clock(
                job, training.iterate, training.greedy, time.perf_counter() - began
            )
        training.algorithm.stop()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
