from .plan_to_target import plan_like as plan_like
from .plans import Plan as Plan
