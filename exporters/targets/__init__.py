"""What each target runs, one file a target, with the version and the origin of the knowledge."""
