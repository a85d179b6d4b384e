"""Packing: converts any source of examples to a few large files that are fast to read."""

from .packing import pack as pack
from .writer import SHARD_BYTES as SHARD_BYTES, Writer as Writer, write_packed as write_packed
