"""Recorded data: datasets of episodes, written, read, checked and learned from.

A dataset is a folder in Minari's own layout, `data/main_data.hdf5` with `data/metadata.json`, so
that Minari reads what is written here and the other way round; or tables in Parquet. It holds what
the environment itself showed and took, terminations and truncations apart, the true last
observation of every episode, the probabilities of actions where they are known, and where each
episode comes from.

    with Writer(folder, metadata) as writer: writer.write(episode)
    with Reader(folder) as reader: reader.episode(17)

`Recorder` writes the trajectories of several environments as episodes. `Stream` gives shuffled
batches from the disk, `load` puts a dataset into a replay table; both need no more memory than they
are told.
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
