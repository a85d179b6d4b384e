from .plans import Plan as Plan
