"""What a run looks like to a person: tables and lines made from plain data, apart from whoever ran it."""
