"""Whether the hand-written fused PPO computes what Dovetail does: the same weights, to rounding.

A comparison of speed means something only between programs that do the same work.
"""

import json

import jax
import numpy as np

import dovetail as dt
from benchmarks import ours
from benchmarks.handwritten import fused_ppo
from benchmarks.protocol import Job

UPDATES = 5


def main() -> None:
    job = Job("threshold", 64, 10**6, seed=0, threads=1, devices=1, env="dovetail:CartPole-v1")
    training = ours.Training(job, ours.algorithm(), dt.policies.Fused(envs=job.envs))
    env = dt.envs.resolve(job.env, traced=True).jax
    learner, actors = jax.jit(lambda: fused_ppo.start(env, job.envs, job.seed))()
    program = jax.jit(lambda *state: fused_ppo.many_iterations(env, *state))
    learner, *_ = program(learner, actors, np.int32(UPDATES))
    training.iterate(UPDATES)
    training.close()
    mine = jax.tree.leaves(training.state.params)
    theirs = jax.tree.leaves(learner.params)
    largest = max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max())
        for a, b in zip(mine, theirs, strict=True)
    )
    print(f"largest difference of any weight after {UPDATES} updates: {largest:g}")
    print(json.dumps({"updates": UPDATES, "largest_difference": largest}))


if __name__ == "__main__":
    main()
