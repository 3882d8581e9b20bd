"""Other implementations (peers) of our operations, one module per family."""
