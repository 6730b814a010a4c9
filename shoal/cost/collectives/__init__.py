"""Collectives and their algorithms: steps, bytes, and seconds over a cluster's levels of links."""
