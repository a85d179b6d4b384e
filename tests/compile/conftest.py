"""What tests of compilers and of plans share."""

from compile_fixtures import cache_home, child

__all__ = ["cache_home", "child"]
