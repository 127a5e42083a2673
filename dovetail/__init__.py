"""Dovetail: write a reinforcement-learning algorithm once, run it anywhere.

Every public name is exported here. Submodules are imported on first access, so that `import
dovetail` and `dovetail --help` stay fast.
"""

from typing import TYPE_CHECKING

from dovetail.lazy import lazy_attributes

if TYPE_CHECKING:  # for type checkers and editors; a test compares it with the list below
    from dovetail import algorithms as algorithms
    from dovetail import data as data
    from dovetail import envs as envs
    from dovetail import functions as functions
    from dovetail import networks as networks
    from dovetail import strategies as strategies
    from dovetail.algorithm import RL as RL
    from dovetail.algorithm import Algorithm as Algorithm
    from dovetail.algorithm import Correction as Correction
    from dovetail.algorithm import Task as Task
    from dovetail.algorithm import Timestep as Timestep
    from dovetail.algorithm import Trajectory as Trajectory
    from dovetail.batching import batched as batched
    from dovetail.boundaries import at as at
    from dovetail.errors import UserError as UserError
    from dovetail.estimation.estimate import estimate as estimate
    from dovetail.evaluation.load import load as load
    from dovetail.evaluation.policy import Policy as Policy
    from dovetail.evaluation.trained import evaluate_run as evaluate_run
    from dovetail.evaluation.watch import watch as watch
    from dovetail.hosts.deployment import Deployment as Deployment
    from dovetail.inspection.analyze import analyze as analyze
    from dovetail.inspection.doctor import doctor as doctor
    from dovetail.inspection.doctor import stacks as stacks
    from dovetail.inspection.explain import explain as explain
    from dovetail.inspection.interpret import interpret as interpret
    from dovetail.run.folder import Run as Run
    from dovetail.run.settings import Settings as Settings
    from dovetail.telemetry.plot import plot as plot
    from dovetail.telemetry.trace import write_trace as write_trace
    from dovetail.training.callbacks import TrainingEvent as TrainingEvent
    from dovetail.training.planning import trace as trace
    from dovetail.training.replay_servers import ServedReplay as ServedReplay
    from dovetail.training.replay_servers import serve_replay as serve_replay
    from dovetail.training.train import resume as resume
    from dovetail.training.train import train as train

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
        "dovetail.evaluation.load:load",
        "dovetail.evaluation.policy:Policy",
        "dovetail.inspection.interpret:interpret",
        "dovetail.training.planning:trace",
        "dovetail.run.folder:Run",
        "dovetail.training.replay_servers:ServedReplay",
        "dovetail.training.replay_servers:serve_replay",
        "dovetail.run.settings:Settings",
        "dovetail.telemetry.plot:plot",
        "dovetail.telemetry.trace:write_trace",
        "dovetail.evaluation.trained:evaluate_run",
        "dovetail.evaluation.watch:watch",
        "dovetail.training.callbacks:TrainingEvent",
        "dovetail.training.train:resume",
        "dovetail.training.train:train",
    ],
    modules=["algorithms", "data", "envs", "functions", "networks", "strategies"],
    package="dovetail",
)
