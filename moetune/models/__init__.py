"""Model shapes: catalogue, config.json, and the work that a shape must do."""
