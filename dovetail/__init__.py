"""Dovetail: write a reinforcement-learning algorithm once, run it anywhere.

Everything public is here; nothing heavy is imported before it is used.
"""

from dovetail.lazy import lazy_attributes

__getattr__, __dir__, __all__ = lazy_attributes(
    [
        "dovetail.algorithm:Algorithm",
        "dovetail.algorithm:Correction",
        "dovetail.algorithm:RL",
        "dovetail.algorithm:Task",
        "dovetail.algorithm:Timestep",
        "dovetail.algorithm:Trajectory",
        "dovetail.boundaries:at",
        "dovetail.analysis:analyze",
        "dovetail.batching:batched",
        "dovetail.deployment:Deployment",
        "dovetail.diagnosis:doctor",
        "dovetail.diagnosis:stacks",
        "dovetail.errors:UserError",
        "dovetail.estimation.estimate:estimate",
        "dovetail.explanation:explain",
        "dovetail.export:load_policy",
        "dovetail.interpretation:interpret",
        "dovetail.planning:trace",
        "dovetail.run:Run",
        "dovetail.served:ServedReplay",
        "dovetail.served:serve_replay",
        "dovetail.settings:Settings",
        "dovetail.telemetry.plot:plot",
        "dovetail.telemetry.trace:write_trace",
        "dovetail.trained:evaluate_run",
        "dovetail.trained:watch",
        "dovetail.training:resume",
        "dovetail.training:train",
    ],
    modules=["algorithms", "data", "envs", "functions", "networks", "policies"],
    package="dovetail",
)
