"""Recorded data: datasets of episodes, to write, read, check and learn from.

A dataset is a folder in Minari's layout, `data/main_data.hdf5` with `data/metadata.json`, so that
Minari and Dovetail read each other's datasets; or tables in Parquet. It holds the environment's own
observations and actions, separate terminations and truncations, the true final observation of every
episode, the log-probabilities of actions where known, and the source of each episode.

    with Writer(folder, metadata) as writer: writer.write(episode)
    with Reader(folder) as reader: reader.episode(17)

`Recorder` writes the trajectories of several environments as episodes. `Stream` yields shuffled
batches from disk, `load` puts a dataset into a replay table; both respect a memory limit.
"""

from dovetail.lazy import lazy_attributes

__getattr__, __dir__, __all__ = lazy_attributes(
    [
        "dovetail.data.episode:Episode",
        "dovetail.data.episode:Rows",
        "dovetail.data.episode:Source",
        "dovetail.data.loading:load",
        "dovetail.data.metadata:Metadata",
        "dovetail.data.reader:Reader",
        "dovetail.data.reader:check_fits",
        "dovetail.data.recorder:Recorder",
        "dovetail.data.recorder:record",
        "dovetail.data.stream:Stream",
        "dovetail.data.summary:info",
        "dovetail.data.transfer:merge",
        "dovetail.data.transfer:split",
        "dovetail.data.writer:Writer",
        "dovetail.data.writer:repair",
    ],
    package="dovetail.data",
)
