"""The mathematics alone: advantages, the loss, the staleness bound."""
