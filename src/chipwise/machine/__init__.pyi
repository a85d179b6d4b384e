from . import detect as detect
from . import hosts as hosts
