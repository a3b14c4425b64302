"""Every sample's outputs, remembered by its index."""

from saltflat.memory.average import Average
from saltflat.memory.codecs import CODECS
from saltflat.memory.indexing import indexed_loader, split_index, with_index, with_index_column
from saltflat.memory.ring import Ring

__all__ = [
    "CODECS",
    "Average",
    "Ring",
    "indexed_loader",
    "split_index",
    "with_index",
    "with_index_column",
]
