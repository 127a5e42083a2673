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
        "dovetail.inspection.analyze:analyze",
        "dovetail.batching:batched",
        "dovetail.hosts.deployment:Deployment",
        "dovetail.inspection.doctor:doctor",
        "dovetail.inspection.doctor:stacks",
        "dovetail.errors:UserError",
        "dovetail.estimation.estimate:estimate",
        "dovetail.inspection.explain:explain",
        "dovetail.evaluation.export:load_policy",
        "dovetail.inspection.interpret:interpret",
        "dovetail.training.planning:trace",
        "dovetail.run.folder:Run",
        "dovetail.training.replay_servers:ServedReplay",
        "dovetail.training.replay_servers:serve_replay",
        "dovetail.run.settings:Settings",
        "dovetail.telemetry.plot:plot",
        "dovetail.telemetry.trace:write_trace",
        "dovetail.evaluation.trained:evaluate_run",
        "dovetail.evaluation.trained:watch",
        "dovetail.training:resume",
        "dovetail.training:train",
    ],
    modules=["algorithms", "data", "envs", "functions", "networks", "strategies"],
    package="dovetail",
)
