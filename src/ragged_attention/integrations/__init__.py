"""What other programs load: our operations under the interfaces by which they take attention from outside."""
