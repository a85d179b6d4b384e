"""Models of other frameworks as the plain functions of a `Task`."""
