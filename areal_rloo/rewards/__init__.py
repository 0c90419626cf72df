"""What a completion is worth: answers taken out of text and compared."""
