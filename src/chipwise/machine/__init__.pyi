from . import detect as detect, hosts as hosts
