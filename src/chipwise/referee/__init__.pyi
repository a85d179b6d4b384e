from .verdict import Verdict as Verdict
from .verdict import referee as referee
