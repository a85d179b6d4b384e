"""The same training at another batch, number of replicas or length; and settings written elsewhere."""
