from . import detect as detect, hosts as hosts
from .portable_cpu import portable as portable
