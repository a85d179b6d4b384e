"""Packing: any source of examples into a few large files that are read at the speed of memory."""

from .job import pack as pack
from .writer import SHARD_BYTES as SHARD_BYTES
from .writer import Writer as Writer
from .writer import write_packed as write_packed
